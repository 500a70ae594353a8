"""A matrix product: tiles in an order that reuses the cache, and an activation before the result is written.

python examples/triton/03_matmul.py
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from compare import DEVICE, ON_CPU, compare

BLOCKS = {"BM": 256, "BN": 256, "BK": 128} if ON_CPU else {"BM": 64, "BN": 64, "BK": 32}
SLOPE = 0.01


@triton.jit
def leaky_relu(x, slope):
    return tl.where(x > 0, x, x * slope)


@triton.jit
def tile_in_band(number, tiles_m, tiles_n, BAND: tl.constexpr):
    """Tiles are numbered down the columns of bands, BAND tiles high: neighbours share rows of a and columns of b."""
    tiles_of_band = BAND * tiles_n
    top = number // tiles_of_band * BAND
    height = min(tiles_m - top, BAND)  # the last band may be lower
    within = number % tiles_of_band
    return top + within % height, within // height


@triton.jit
def matmul_tile(
    a, b, c, M, N, K, a_row, a_column, b_row, b_column, c_row, slope,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BAND: tl.constexpr, ACTIVATE: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = tile_in_band(tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(N, BN), BAND)
    row = tile_m * BM + tl.arange(0, BM)
    column = tile_n * BN + tl.arange(0, BN)
    depth = tl.arange(0, BK)
    # Rows and columns beyond the edge read something valid that is never stored; along K, zeros add nothing.
    a_tile = a + (row % M)[:, None] * a_row + depth[None, :] * a_column
    b_tile = b + depth[:, None] * b_row + (column % N)[None, :] * b_column
    total = tl.zeros([BM, BN], tl.float32)
    for done in range(0, K, BK):
        left = tl.load(a_tile, mask=depth[None, :] < K - done, other=0.0)
        right = tl.load(b_tile, mask=depth[:, None] < K - done, other=0.0)
        total = tl.dot(left, right, total)
        a_tile += BK * a_column
        b_tile += BK * b_row
    if ACTIVATE:  # while the tile is at hand, this costs no trip to memory
        total = leaky_relu(total, slope)
    inside = (row < M)[:, None] & (column < N)[None, :]
    tl.store(c + row[:, None] * c_row + column[None, :], total.to(c.dtype.element_ty), mask=inside)


def matmul(
    a: torch.Tensor, b: torch.Tensor, activate: bool = False, blocks: dict[str, int] = BLOCKS, band: int = 4
) -> torch.Tensor:
    """a @ b, of any strides; leaky ReLU on it where `activate`."""
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty(m, n, device=a.device, dtype=a.dtype)
    grid = (triton.cdiv(m, blocks["BM"]) * triton.cdiv(n, blocks["BN"]),)
    matmul_tile[grid](
        a, b, c, m, n, k, *a.stride(), *b.stride(), c.stride(0), SLOPE, BAND=band, ACTIVATE=activate, **blocks
    )
    return c


def main() -> None:
    torch.manual_seed(0)
    for m, n, k in ((512, 512, 512), (1024, 1024, 1024), (700, 500, 300)):
        a, b = torch.randn(m, k, device=DEVICE) / k**0.5, torch.randn(k, n, device=DEVICE)
        compare(f"matmul, {m} x {n} x {k}", lambda a=a, b=b: matmul(a, b), lambda a=a, b=b: a @ b, 2e-2)
        compare(
            "    with leaky ReLU",
            lambda a=a, b=b: matmul(a, b, activate=True),
            lambda a=a, b=b: F.leaky_relu(a @ b, SLOPE),
            2e-2,
        )


if __name__ == "__main__":
    main()
