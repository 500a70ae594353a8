"""The CPU backend against torch, on one thread: kernels as everybody writes them. Prints a Markdown table."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["TRITON_EXT_NUM_THREADS"] = "1"

import importlib
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from kernels import embedding_kernel, gemv_kernel
from triton_ext.ops import embedding, gemv

Call = Callable[[], torch.Tensor]
EXAMPLES = Path(__file__).parents[1] / "examples" / "triton"
sys.path.append(str(EXAMPLES))  # whose kernels are measured here as well


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


class Case(NamedTuple):
    """Two calls that give the same tensor. work: of one call, in units of 1e9."""

    name: str
    ours: Call
    theirs: Call
    work: float
    unit: str


def vector_add(n: int) -> Case:
    x, y, out, other = torch.randn(n), torch.randn(n), torch.empty(n), torch.empty(n)

    def ours() -> torch.Tensor:
        add_kernel[(triton.cdiv(n, 4096),)](x, y, out, n, BLOCK=4096)
        return out

    return Case(f"vector add, {n}", ours, lambda: torch.add(x, y, out=other), 12 * n / 1e9, "GB/s")


def softmax(rows: int, columns: int) -> Case:
    x, out, other = torch.randn(rows, columns), torch.empty(rows, columns), torch.empty(rows, columns)

    def ours() -> torch.Tensor:
        softmax_kernel[(rows,)](x, out, columns, columns, BLOCK=triton.next_power_of_2(columns))
        return out

    return Case(f"softmax, {rows} x {columns}", ours, lambda: torch.softmax(x, 1, out=other), 8e-9 * x.numel(), "GB/s")


def matmul(size: int) -> Case:
    a, b, c, other = (torch.randn(size, size) for _ in range(4))
    blocks = {"BM": min(512, size // 2), "BN": 256, "BK": 128, "GROUP": 4}
    tiles = triton.cdiv(size, blocks["BM"]) * triton.cdiv(size, blocks["BN"])

    def ours() -> torch.Tensor:
        matmul_kernel[(tiles,)](a, b, c, size, size, size, **blocks)
        return c

    return Case(f"matmul, {size} cubed", ours, lambda: torch.mm(a, b, out=other), 2e-9 * size**3, "GFLOP/s")


def linear(batch: int, n: int, k: int) -> Case:
    x, w, y = torch.randn(batch, k), torch.randn(n, k), torch.empty(batch, n)
    constants = gemv.configuration(batch, x.device)

    def ours() -> torch.Tensor:
        gemv_kernel[(triton.cdiv(n, constants["BN"]),)](x, w, y, batch, n, k, *x.stride(), *w.stride(), **constants)
        return y

    return Case(f"linear, batch {batch}, {n} x {k}", ours, lambda: F.linear(x, w), 4e-9 * w.numel(), "GB/s")


def embedding_bags(tables: int, samples: int, dim: int, lookups: int, rows: int) -> Case:
    weight, starts = torch.randn(tables * rows, dim), torch.arange(tables) * rows
    indices = torch.randint(0, rows, (tables * samples * lookups,))
    offsets = (torch.arange(tables * samples) * lookups).view(tables, samples)
    pooled = torch.empty(samples, tables, dim)
    block = embedding.configuration(dim, weight.device)

    def ours() -> torch.Tensor:
        embedding_kernel[(triton.cdiv(samples, block["BB"]) * tables,)](
            weight, starts, indices, offsets, pooled, samples, tables, dim, len(indices), dim, MEAN=False, **block
        )
        return pooled

    def theirs() -> torch.Tensor:
        each = zip(indices.view(tables, -1), weight.view(tables, rows, dim), strict=True)
        return torch.stack([F.embedding_bag(chosen, table, offsets[0], mode="sum") for chosen, table in each], 1)

    name = f"{tables} embedding bags, {samples} x {lookups} look-ups of {dim}"
    return Case(name, ours, theirs, 4e-9 * indices.numel() * dim, "GB/s")


def layer_norm(rows: int, columns: int) -> Case:
    x, weight, bias = torch.randn(rows, columns), torch.randn(columns), torch.randn(columns)
    ours = importlib.import_module("05_layer_norm").layer_norm
    return Case(
        f"layer norm, {rows} x {columns}",
        lambda: ours(x, weight, bias),
        lambda: F.layer_norm(x, (columns,), weight, bias),
        8e-9 * x.numel(),
        "GB/s",
    )


def attention(heads: int, length: int, size: int) -> Case:
    q, k, v = (torch.randn(1, heads, length, size) for _ in range(3))
    ours = importlib.import_module("06_attention").attention
    return Case(
        f"attention, {heads} heads, {length} x {size}",
        lambda: ours(q, k, v),
        lambda: F.scaled_dot_product_attention(q, k, v),
        4e-9 * heads * length**2 * size,
        "GFLOP/s",
    )


CASES: list[Callable[[], Case]] = [
    partial(vector_add, 1 << 24),
    partial(softmax, 4096, 1024),
    partial(layer_norm, 4096, 1024),
    *(partial(attention, 8, length, 64) for length in (1024, 2048)),
    *(partial(matmul, size) for size in (512, 1024, 2048)),
    *(partial(linear, batch, 8192, 4096) for batch in (1, 8)),
    partial(embedding_bags, 64, 512, 64, 32, 10_000),
]


def measure(case: Case, runs: int = 21) -> str:
    """A row of the table: medians of interleaved runs."""
    start = time.perf_counter()
    result = case.ours()
    first_s = time.perf_counter() - start
    torch.testing.assert_close(result, case.theirs(), rtol=1e-3, atol=1e-3)
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(runs):
        for call, seconds in zip((case.ours, case.theirs), times, strict=True):
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
    ours, theirs = (statistics.median(seconds) for seconds in times)
    cells = [case.name, f"{ours * 1e3:.3g}", f"{theirs * 1e3:.3g}", f"{theirs / ours:.2f}"]
    return " | ".join([*cells, f"{case.work / ours:.3g} {case.unit}", f"{first_s:.2f}"])


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print("| kernel | triton_ext (ms) | torch (ms) | torch / triton_ext | rate | first launch (s) |")
    print("|---|---:|---:|---:|---:|---:|")
    for make in CASES:
        print(f"| {measure(make())} |", flush=True)


if __name__ == "__main__":
    main()
