"""Many products of different sizes in one launch: a fixed number of programs walks over the tiles of all of them.

python examples/triton/07_grouped_gemm.py
"""

import torch
import triton
import triton.language as tl
from compare import DEVICE, ON_CPU, compare, processors

BLOCKS = {"BM": 128, "BN": 256, "BK": 128} if ON_CPU else {"BM": 64, "BN": 64, "BK": 32}


@triton.jit
def product_tile(a, b, c, M, N, K, tile_m, tile_n, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """One tile of c = a @ b, all contiguous."""
    row = tile_m * BM + tl.arange(0, BM)
    column = tile_n * BN + tl.arange(0, BN)
    total = tl.zeros([BM, BN], tl.float32)
    for done in range(0, K, BK):
        depth = done + tl.arange(0, BK)
        left = tl.load(a + row[:, None] * K + depth, mask=(row < M)[:, None] & (depth < K), other=0.0)
        right = tl.load(b + depth[:, None] * N + column, mask=(depth < K)[:, None] & (column < N), other=0.0)
        total = tl.dot(left, right, total)
    inside = (row < M)[:, None] & (column < N)
    tl.store(c + row[:, None] * N + column, total.to(c.dtype.element_ty), mask=inside)


@triton.jit
def grouped_product(
    addresses, sizes, products, DTYPE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    """addresses: of a, b, c for each product; sizes: M, N, K. Tiles are numbered through all products."""
    tile = tl.program_id(0)
    before = 0  # tiles of the products in front of this one
    for product in range(products):
        M = tl.load(sizes + 3 * product)
        N = tl.load(sizes + 3 * product + 1)
        K = tl.load(sizes + 3 * product + 2)
        a = tl.load(addresses + 3 * product).to(tl.pointer_type(DTYPE))
        b = tl.load(addresses + 3 * product + 1).to(tl.pointer_type(DTYPE))
        c = tl.load(addresses + 3 * product + 2).to(tl.pointer_type(DTYPE))
        across = tl.cdiv(N, BN)
        behind = before + tl.cdiv(M, BM) * across
        while tile < behind:
            within = tile - before
            product_tile(a, b, c, M, N, K, within // across, within % across, BM, BN, BK)
            tile += tl.num_programs(0)
        before = behind


TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def grouped_matmul(
    left: list[torch.Tensor], right: list[torch.Tensor], blocks: dict[str, int] = BLOCKS, programs: int | None = None
) -> list[torch.Tensor]:
    """[a @ b for a, b in zip(left, right)], of contiguous matrices of one type."""
    results = [a.new_empty(a.shape[0], b.shape[1]) for a, b in zip(left, right, strict=True)]
    operands = list(zip(left, right, results, strict=True))
    addresses = torch.tensor([[x.data_ptr() for x in three] for three in operands], device=left[0].device)
    shapes = [[a.shape[0], b.shape[1], a.shape[1]] for a, b, _ in operands]
    sizes = torch.tensor(shapes, dtype=torch.int32, device=left[0].device)
    grouped_product[(programs or processors(),)](addresses, sizes, len(operands), DTYPE=TYPES[left[0].dtype], **blocks)
    return results


def main() -> None:
    torch.manual_seed(0)
    # As the experts of a mixture get them: different numbers of rows.
    for rows in ((512, 512, 512, 512), (17, 400, 3, 900, 128, 64)):
        left = [torch.randn(m, 512, device=DEVICE) / 512**0.5 for m in rows]
        right = [torch.randn(512, 384, device=DEVICE) for _ in rows]
        compare(
            f"{len(rows)} products, {sum(rows)} rows in all",
            lambda left=left, right=right: torch.cat(grouped_matmul(left, right)),
            lambda left=left, right=right: torch.cat([a @ b for a, b in zip(left, right, strict=True)]),
            2e-2,
        )


if __name__ == "__main__":
    main()
