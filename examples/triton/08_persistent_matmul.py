"""A product by as many programs as there are processors, each of which takes tile after tile by descriptor.

python examples/triton/08_persistent_matmul.py
"""

import torch
import triton
import triton.language as tl
from compare import DEVICE, ON_CPU, compare, processors

BLOCKS = {"BM": 256, "BN": 256, "BK": 128} if ON_CPU else {"BM": 128, "BN": 64, "BK": 32}


@triton.jit
def persistent_product(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BAND: tl.constexpr):
    # A descriptor knows where its matrix ends: there are no masks to write.
    a_tiles = tl.make_tensor_descriptor(a, shape=[M, K], strides=[K, 1], block_shape=[BM, BK])
    b_tiles = tl.make_tensor_descriptor(b, shape=[K, N], strides=[N, 1], block_shape=[BK, BN])
    c_tiles = tl.make_tensor_descriptor(c, shape=[M, N], strides=[N, 1], block_shape=[BM, BN])
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    for tile in range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        # Down the columns of a band of tiles, as in 03_matmul.py.
        band = tile // (BAND * tiles_n)
        height = min(tiles_m - band * BAND, BAND)
        within = tile % (BAND * tiles_n)
        row = (band * BAND + within % height) * BM
        column = within // height * BN
        total = tl.zeros([BM, BN], tl.float32)
        for depth in range(0, K, BK):
            total = tl.dot(a_tiles.load([row, depth]), b_tiles.load([depth, column]), total)
        c_tiles.store([row, column], total.to(c.dtype.element_ty))


def persistent_matmul(
    a: torch.Tensor, b: torch.Tensor, blocks: dict[str, int] = BLOCKS, programs: int | None = None
) -> torch.Tensor:
    """a @ b, both contiguous, with rows that are multiples of 16 bytes."""
    (m, k), n = a.shape, b.shape[1]
    c = a.new_empty(m, n)
    tiles = triton.cdiv(m, blocks["BM"]) * triton.cdiv(n, blocks["BN"])
    persistent_product[(min(tiles, programs or processors()),)](a, b, c, m, n, k, BAND=4, **blocks)
    return c


def main() -> None:
    if not ON_CPU:  # a GPU keeps the descriptors that a kernel makes in memory
        triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=DEVICE))
    torch.manual_seed(0)
    for m, n, k in ((512, 512, 512), (1024, 1024, 1024), (1000, 600, 300)):
        a, b = torch.randn(m, k, device=DEVICE) / k**0.5, torch.randn(k, n, device=DEVICE)
        name = f"persistent matmul, {m} x {n} x {k}"
        compare(name, lambda a=a, b=b: persistent_matmul(a, b), lambda a=a, b=b: a @ b, 2e-2)


if __name__ == "__main__":
    main()
