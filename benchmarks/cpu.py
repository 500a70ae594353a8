"""The CPU backend against torch, on one thread: kernels as everybody writes them.

Prints a Markdown table; writes results/bench-cpu.json and results/bench-cpu.png.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["TRITON_EXT_NUM_THREADS"] = "1"

import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
import typer

import report
from bench import environment
from kernels import embedding_kernel, gemv_kernel
from triton_ext.backends.cpu.codegen import native
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


@triton.jit
def multiply_add_kernel(x, factor, term, rounds, LANES: tl.constexpr, STEPS: tl.constexpr):
    """Multiply-adds in registers and nothing else."""
    lanes = tl.arange(0, LANES)
    value = tl.load(x + lanes)
    for _ in range(rounds):
        for _ in tl.static_range(STEPS):
            value = value * factor + term
    tl.store(x + lanes, value)


class Case(NamedTuple):
    """Two calls that give the same tensor. work: of one call, in units of 1e9."""

    name: str
    ours: Call
    theirs: Call
    work: float
    unit: str
    dtype: torch.dtype = torch.float32
    against: str = "torch"
    threads: int = 1


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


def matmul(size: int, dtype: torch.dtype = torch.float32) -> Case:
    a, b, c, other = (torch.randn(size, size).to(dtype) for _ in range(4))
    name = f"matmul, {size} cubed" + ("" if dtype == torch.float32 else f", {_name(dtype)}")
    work = 2e-9 * size**3
    return Case(name, _product(a, b, c), lambda: torch.mm(a, b, out=other), work, "GFLOP/s", dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _product(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> Call:
    """c = a @ b of square matrices."""
    size = len(a)
    blocks = {"BM": min(256, size // 2), "BN": min(512, size), "BK": 128, "GROUP": 4}
    tiles = triton.cdiv(size, blocks["BM"]) * triton.cdiv(size, blocks["BN"])

    def ours() -> torch.Tensor:
        matmul_kernel[(tiles,)](a, b, c, size, size, size, **blocks)
        return c

    return ours


def matmul_onednn(size: int) -> Case:
    """torch.mm of float32 is MKL's, which reaches half of the speed of oneDNN on AMD's Zen 5: a stronger comparison."""
    a, b, c = (torch.randn(size, size) for _ in range(3))
    x, w = a.to_mkldnn(), b.T.contiguous().to_mkldnn()
    name, work = f"matmul, {size} cubed, against oneDNN", 2e-9 * size**3
    return Case(name, _product(a, b, c), lambda: F.linear(x, w).to_dense(), work, "GFLOP/s", against="onednn")


def matmul_threads(size: int, threads: int) -> Case:
    """Against the same on one thread."""
    case = matmul(size)

    def on(count: int) -> torch.Tensor:
        os.environ["TRITON_EXT_NUM_THREADS"] = str(count)
        result = case.ours()
        os.environ["TRITON_EXT_NUM_THREADS"] = "1"
        return result

    name = f"{case.name}, {threads} threads against 1"
    return case._replace(
        name=name, ours=partial(on, threads), theirs=partial(on, 1), against="one_thread", threads=threads
    )


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
    *(partial(matmul_onednn, size) for size in (1024, 2048)),
    *(partial(matmul, size, torch.bfloat16) for size in (512, 1024, 2048)),
    partial(matmul, 1024, torch.float16),
    partial(matmul_threads, 2048, 2),
    *(partial(linear, batch, 8192, 4096) for batch in (1, 8)),
    partial(embedding_bags, 64, 512, 64, 32, 10_000),
]


_MOST_S = 10.0  # of either side of a case


def measure(case: Case, runs: int) -> tuple[dict[str, list[float]], float]:
    """Seconds of interleaved runs of both sides, and of our first. Fewer runs where one takes long."""
    start = time.perf_counter()
    result = case.ours()
    first_s = time.perf_counter() - start
    start = time.perf_counter()
    expected = case.theirs()
    runs = max(3, min(runs, int(_MOST_S / (time.perf_counter() - start))))
    tolerance = 1e-3 if case.dtype == torch.float32 else 2e-2
    scale = max(1.0, float(expected.abs().max())) if case.dtype != torch.float32 else 1.0
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance * scale)
    times: dict[str, list[float]] = {"triton_ext": [], case.against: []}
    for _ in range(runs):
        for call, seconds in zip((case.ours, case.theirs), times.values(), strict=True):
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
    return times, first_s


def row(case: Case, times: dict[str, list[float]], first_s: float) -> str:
    """Of the Markdown table."""
    ours, theirs = (statistics.median(seconds) for seconds in times.values())
    cells = [case.name, f"{ours * 1e3:.3g}", f"{theirs * 1e3:.3g}", f"{theirs / ours:.2f}"]
    return "| " + " | ".join([*cells, f"{case.work / ours:.3g} {case.unit}", f"{first_s:.2f}"]) + " |"


def records(case: Case, times: dict[str, list[float]], limits: dict[str, float]) -> list[report.Record]:
    """One of each side, and one of the time in which the machine's limit allows the work."""
    name, _, shape = case.name.partition(", ")
    rate = limits["copy GB/s"] if case.unit == "GB/s" else limits[f"{_name(case.dtype)} GFLOP/s"] * case.threads
    common = {"operator": name, "shape": {shape: ""}, "dtype": _name(case.dtype), "threads": case.threads}
    found: list[report.Record] = []
    for variant, seconds in (times | {"limit": [case.work / rate] * 2}).items():
        tenths = statistics.quantiles(seconds, n=10, method="inclusive")
        found.append(
            {
                **common,
                "variant": variant,
                "median_ms": statistics.median(seconds) * 1e3,
                "p10_ms": tenths[0] * 1e3,
                "p90_ms": tenths[-1] * 1e3,
                "runs": len(seconds),
            }
        )
    return found


def machine_limits() -> dict[str, float]:
    """What one thread can do: a copy (read and written), multiply-adds of each type. The best of several runs."""
    source, target = torch.ones(1 << 26), torch.empty(1 << 26)
    lanes, steps, rounds = 512, 16, 20_000
    x = torch.ones(lanes)

    def multiply_adds() -> None:
        multiply_add_kernel[(1,)](x, 0.5, 0.25, rounds, LANES=lanes, STEPS=steps)

    def fastest(call: Callable[[], Any]) -> float:
        call()
        times = []
        for _ in range(15):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return min(times)

    flops = 2e-9 * lanes * steps * rounds / fastest(multiply_adds)
    # An instruction for pairs does twice the work of a multiply-add.
    bfloat16 = 2 * flops if native.host_vectors().bf16_dot else flops
    copied = 8e-9 * source.numel() / fastest(lambda: target.copy_(source))
    return {"copy GB/s": copied, "float32 GFLOP/s": flops, "float16 GFLOP/s": flops, "bfloat16 GFLOP/s": bfloat16}


def main(
    runs: Annotated[int, typer.Option(help="Samples of each side.")] = 21,
    only: Annotated[str, typer.Option(help="Cases whose name has this in it.")] = "",
    output: Annotated[Path, typer.Option(help="Directory for bench-cpu.json and bench-cpu.png.")] = Path("results"),
) -> None:
    """Measure, and report."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    output.mkdir(parents=True, exist_ok=True)
    limits = machine_limits()
    print("limits: " + ", ".join(f"{name}: {rate:.3g}" for name, rate in limits.items()))
    print("\n| kernel | triton_ext (ms) | torch (ms) | torch / triton_ext | rate | first launch (s) |")
    print("|---|---:|---:|---:|---:|---:|")
    found: list[report.Record] = []
    for make in CASES:
        case = make()
        if only in case.name:
            times, first_s = measure(case, runs)
            print(row(case, times, first_s), flush=True)
            found += records(case, times, limits)
    content = {"environment": environment(), "limits": limits, "records": found}
    (output / "bench-cpu.json").write_text(json.dumps(content, indent=1))
    report.plot(found, output / "bench-cpu.png", "work / (multiply-adds in registers, or a copy)", logarithmic=True)


if __name__ == "__main__":
    typer.run(main)
