"""The operators' kernels without their collective: the same tiles, stored in this rank's own memory."""

import triton
import triton.language as tl

from triton_ext.ops.embedding import pooled_tile
from triton_ext.ops.gemm import product_tile
from triton_ext.ops.gemv import linear_tile


@triton.jit
def gemm_kernel(a, b, c, M, N, K, stride_am, stride_ak, stride_bk, stride_bn,
                BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """c: [M, N]."""
    tile_m = tl.program_id(0) // tl.cdiv(N, BN)
    tile_n = tl.program_id(0) % tl.cdiv(N, BN)
    acc = product_tile(a, b, tile_m, tile_n, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, BM, BN, BK)
    rows = tile_m * BM + tl.arange(0, BM)
    columns = tile_n * BN + tl.arange(0, BN)
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    tl.store(c + rows[:, None].to(tl.int64) * N + columns[None, :], acc, mask=inside)


@triton.jit
def gemv_kernel(x, w, y, B, N, K, stride_xb, stride_xk, stride_wn, stride_wk,
                BB: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, DOT: tl.constexpr):  # fmt: skip
    """y: [B, N]."""
    tile_b = tl.program_id(0) // tl.cdiv(N, BN)
    tile_n = tl.program_id(0) % tl.cdiv(N, BN)
    acc = linear_tile(x, w, tile_b, tile_n, B, N, K, stride_xb, stride_xk, stride_wn, stride_wk, BB, BN, BK, DOT)
    batch = tile_b * BB + tl.arange(0, BB)
    rows = tile_n * BN + tl.arange(0, BN)
    tl.store(y + batch[:, None] * N + rows[None, :], acc, mask=(batch < B)[:, None] & (rows < N)[None, :])


@triton.jit
def embedding_kernel(weight, table_starts, indices, offsets, pooled, B, T, D, n_indices, stride_w,
                     MEAN: tl.constexpr, BB: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    """pooled: [B, T, D]."""
    tiles_b, tiles_d = tl.cdiv(B, BB), tl.cdiv(D, BD)
    tile_b = tl.program_id(0) % tiles_b
    tile_d = tl.program_id(0) // tiles_b % tiles_d
    table = tl.program_id(0) // tiles_b // tiles_d
    acc = pooled_tile(
        weight, table_starts, indices, offsets, tile_b, table, tile_d, B, T, D, n_indices, stride_w, MEAN, BB, BD
    )
    samples = tile_b * BB + tl.arange(0, BB)
    columns = tile_d * BD + tl.arange(0, BD)
    place = pooled + (samples[:, None].to(tl.int64) * T + table) * D + columns[None, :]
    tl.store(place, acc, mask=(samples < B)[:, None] & (columns < D)[None, :])
