"""The CPU backend against torch, on one thread: kernels as everybody writes them. Prints a Markdown table."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["TRITON_EXT_NUM_THREADS"] = "1"

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from kernels import embedding_kernel, gemv_kernel

from triton_ext.ops import embedding, gemv


@triton.jit
def add_kernel(x, y, out, n, BLOCK: tl.constexpr):
    """out = x + y."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    total = tl.load(x + offsets, mask=inside) + tl.load(y + offsets, mask=inside)
    tl.store(out + offsets, total, mask=inside)


@triton.jit
def softmax_kernel(x, out, stride, columns, BLOCK: tl.constexpr):
    """A program takes one row."""
    row = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    inside = offsets < columns
    scores = tl.load(x + row * stride + offsets, mask=inside, other=-float("inf"))
    weights = tl.exp(scores - tl.max(scores, axis=0))
    tl.store(out + row * stride + offsets, weights / tl.sum(weights, axis=0), mask=inside)


@triton.jit
def matmul_kernel(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr):
    """c = a @ b, row-major; tiles in groups of rows, edges wrap around."""
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    first = tl.program_id(0) // (GROUP * tiles_n) * GROUP
    height = tl.minimum(tiles_m - first, GROUP)
    tile_m = first + tl.program_id(0) % (GROUP * tiles_n) % height
    tile_n = tl.program_id(0) % (GROUP * tiles_n) // height
    rows, columns = (tile_m * BM + tl.arange(0, BM)) % M, (tile_n * BN + tl.arange(0, BN)) % N
    depth = tl.arange(0, BK)
    x, y = a + rows[:, None] * K + depth[None, :], b + depth[:, None] * N + columns[None, :]
    acc = tl.zeros([BM, BN], tl.float32)
    for k in range(0, tl.cdiv(K, BK)):
        left = tl.load(x, mask=depth[None, :] < K - k * BK, other=0.0)
        right = tl.load(y, mask=depth[:, None] < K - k * BK, other=0.0)
        acc = tl.dot(left, right, acc)
        x += BK
        y += BK * N
    i, j = tile_m * BM + tl.arange(0, BM), tile_n * BN + tl.arange(0, BN)
    tl.store(c + i[:, None] * N + j[None, :], acc, mask=(i < M)[:, None] & (j < N)[None, :])


def compare(name: str, ours: Callable[[], torch.Tensor], theirs: Callable[[], torch.Tensor], work: float, unit: str) -> None:
    """Print a row: medians of interleaved runs. work: of one call, in 1e9 units."""
    start = time.perf_counter()
    result = ours()
    first_s = time.perf_counter() - start
    torch.testing.assert_close(result, theirs().float(), rtol=1e-3, atol=1e-3)
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(21):
        for call, seconds in zip((ours, theirs), times, strict=True):
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
    own, other = (statistics.median(seconds) for seconds in times)
    print(
        f"| {name} | {own * 1e3:.3g} | {other * 1e3:.3g} | {other / own:.2f} | {work / own:.3g} {unit} | {first_s:.2f} |",
        flush=True,
    )


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print("| kernel | triton_ext (ms) | torch (ms) | torch / triton_ext | rate | first launch (s) |")
    print("|---|---:|---:|---:|---:|---:|")

    n = 1 << 24
    x, y, out, other = torch.randn(n), torch.randn(n), torch.empty(n), torch.empty(n)
    grid = (triton.cdiv(n, 4096),)

    def add() -> torch.Tensor:
        add_kernel[grid](x, y, out, n, BLOCK=4096)
        return out

    compare("vector add, 2^24", add, lambda: torch.add(x, y, out=other), 12 * n / 1e9, "GB/s")

    s, t, u = torch.randn(4096, 1024), torch.empty(4096, 1024), torch.empty(4096, 1024)

    def softmax() -> torch.Tensor:
        softmax_kernel[(4096,)](s, t, 1024, 1024, BLOCK=1024)
        return t

    compare("softmax, 4096 x 1024", softmax, lambda: torch.softmax(s, 1, out=u), 8 * s.numel() / 1e9, "GB/s")

    for size in (512, 1024, 2048):
        a, b, c, d = (torch.randn(size, size) for _ in range(4))

        def matmul(a: torch.Tensor = a, b: torch.Tensor = b, c: torch.Tensor = c, size: int = size) -> torch.Tensor:
            blocks = {"BM": min(512, size // 2), "BN": 256, "BK": 128, "GROUP": 4}
            tiles = triton.cdiv(size, blocks["BM"]) * triton.cdiv(size, blocks["BN"])
            matmul_kernel[(tiles,)](a, b, c, size, size, size, **blocks)
            return c

        compare(
            f"matmul, {size} cubed",
            matmul,
            lambda a=a, b=b, d=d: torch.mm(a, b, out=d),  # type: ignore[misc]
            2 * size**3 / 1e9,
            "GFLOP/s",
        )

    for batch in (1, 8):
        x2, w, y2 = torch.randn(batch, 4096), torch.randn(8192, 4096), torch.empty(batch, 8192)
        constants = gemv.configuration(batch, x2.device)

        def linear(x2: torch.Tensor = x2, y2: torch.Tensor = y2, constants: dict = constants) -> torch.Tensor:
            tiles = triton.cdiv(8192, constants["BN"])
            gemv_kernel[(tiles,)](x2, w, y2, len(x2), 8192, 4096, *x2.stride(), *w.stride(), **constants)
            return y2

        compare(
            f"GEMV, batch {batch}, 8192 x 4096",
            linear,
            lambda x2=x2: F.linear(x2, w),  # type: ignore[misc]
            4 * w.numel() / 1e9,
            "GB/s",
        )

    tables, samples, dim, lookups, rows = 64, 512, 64, 32, 10_000
    weight, starts = torch.randn(tables * rows, dim), torch.arange(tables) * rows
    indices = torch.randint(0, rows, (tables * samples * lookups,))
    offsets = (torch.arange(tables * samples) * lookups).view(tables, samples)
    pooled = torch.empty(samples, tables, dim)
    block = embedding.configuration(dim, weight.device)

    def bags() -> torch.Tensor:
        embedding_kernel[(triton.cdiv(samples, block["BB"]) * tables,)](
            weight, starts, indices, offsets, pooled, samples, tables, dim, len(indices), dim, MEAN=False, **block
        )
        return pooled

    def torch_bags() -> torch.Tensor:
        each = [
            F.embedding_bag(
                indices.view(tables, -1)[i], weight[i * rows : (i + 1) * rows], offsets[i] - offsets[i, 0], mode="sum"
            )
            for i in range(tables)
        ]
        return torch.stack(each, 1)

    compare("64 embedding bags, 512 x 32 look-ups", bags, torch_bags, 4 * indices.numel() * dim / 1e9, "GB/s")


if __name__ == "__main__":
    main()
