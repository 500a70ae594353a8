"""Measurements as tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from rich.table import Table

from ..planner.measurements import Load, Measurements, Transport

_MOST_ROWS = 30  # beyond, one row for each pair of hosts


def ranks(measured: Measurements) -> Table:
    """One row for each rank."""
    table = Table(title="Ranks, all at work at once")
    table.add_column("rank")
    table.add_column("host")
    table.add_column("device")
    units = ("threads", "memory (GiB)", "float32 (TFLOP/s)", "bfloat16 (TFLOP/s)", "memory copy (GB/s)")
    for name in units:
        table.add_column(name, justify="right")
    for number, rank in enumerate(measured.ranks):
        figures = (
            rank.memory_bytes / 2**30,
            rank.float32_flop_per_s / 1e12,
            rank.bfloat16_flop_per_s / 1e12,
            rank.memory_bandwidth_bytes_per_s / 1e9,
        )
        table.add_row(str(number), rank.host, rank.device, str(rank.threads), *(f"{value:.3g}" for value in figures))
    return table


def transfers(measured: Measurements) -> Table:
    """One row for each pair of ranks, or of hosts where that would be too many."""
    table = Table(title=f"Messages ({measured.backend}), and stores to a peer's memory")
    table.add_column("from")
    table.add_column("to")
    for name in (
        "latency (µs)",
        "under load (µs)",
        "alone (GB/s)",
        "both ways (GB/s)",
        "all pairs (GB/s)",
        "store (µs)",
        "store alone (GB/s)",
        "all pairs (GB/s)",
    ):
        table.add_column(name, justify="right")
    world = len(measured.ranks)
    if world * (world - 1) <= _MOST_ROWS:
        rows = [(str(a), str(b), [(a, b)]) for a in range(world) for b in range(world) if a != b]
    else:
        rows = [
            (name, "its own ranks" if name == other else other, [(a, b) for a in here for b in there if a != b])
            for name, here in measured.hosts
            for other, there in measured.hosts
        ]
    for source, destination, pairs in rows:
        if pairs:
            table.add_row(
                source,
                destination,
                _latency(measured, pairs, "messages", "alone"),
                _latency(measured, pairs, "messages", "all_pairs"),
                _bandwidth(measured, pairs, "messages", "alone"),
                _bandwidth(measured, pairs, "messages", "both_ways"),
                _bandwidth(measured, pairs, "messages", "all_pairs"),
                _latency(measured, pairs, "memory", "alone"),
                _bandwidth(measured, pairs, "memory", "alone"),
                _bandwidth(measured, pairs, "memory", "all_pairs"),
            )
    return table


def collectives(measured: Measurements) -> Table:
    """One row for each collective, one column for each size."""
    sizes = sorted({each.tensor_bytes for each in measured.collectives})
    table = Table(title=f"Collectives of all ranks ({measured.backend}): ms, by bytes of a rank's tensor")
    table.add_column("")
    for size in sizes:
        table.add_column(_bytes(size), justify="right")
    for name in dict.fromkeys(each.collective for each in measured.collectives):
        by_size = {each.tensor_bytes: each.seconds for each in measured.collectives if each.collective == name}
        table.add_row(name, *(_number(by_size[size] * 1e3) if size in by_size else "" for size in sizes))
    return table


def _bytes(size: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size} B"


def _latency(measured: Measurements, pairs: Iterable[tuple[int, int]], transport: Transport, load: Load) -> str:
    lines = [t.line for pair in pairs if (t := measured.transfer(*pair, transport, load)) is not None]
    return _number(statistics.median(line.latency_s for line in lines) * 1e6) if lines else ""


def _bandwidth(measured: Measurements, pairs: Iterable[tuple[int, int]], transport: Transport, load: Load) -> str:
    lines = [t.line for pair in pairs if (t := measured.transfer(*pair, transport, load)) is not None]
    return _number(statistics.median(line.bandwidth_bytes_per_s for line in lines) / 1e9) if lines else ""


def _number(value: float) -> str:
    """Three digits, without an exponent."""
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"
