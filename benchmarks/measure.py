"""Interleaved timing of a case's variants on all ranks at once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from cases import Case

_BATCH_S = 0.02  # a sample is as many calls as take this long, so that the ranks' start does not count


def _slowest(seconds: float) -> float:
    """Of all ranks."""
    worst = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst)


def _sample(call: Callable[[], Any], calls: int) -> float:
    """Seconds of one call, on the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return _slowest((time.perf_counter() - start) / calls)


def _error(result: torch.Tensor, reference: torch.Tensor) -> float:
    """The largest difference on any rank, relative to the largest value."""
    return _slowest(float((result.double() - reference).abs().max() / reference.abs().max()))


def _check(case: Case, reference: torch.Tensor) -> dict[str, float]:
    """The error of each variant that gives the operator's result."""
    errors = {name: _error(call(), reference) for name, call in case.variants.items() if name != "compute_only"}
    for name, error in errors.items():
        if not error < 1e-5:
            raise RuntimeError(f"{case.operator} {case.shape}: {name} is wrong, its relative error is {error:.2g}")
    return errors


@dataclass(frozen=True)
class Link:
    """Between hosts. bytes_per_s: as measured, of each direction while both are in use."""

    hosts: int
    gbps: float
    bytes_per_s: float


def measure(case: Case, runs: int, link: Link | None = None) -> list[dict[str, Any]]:
    """Time every variant `runs` times, in turn, and return a record for each, with the limit. Collective.

    The limit is what no schedule can beat: the computation, or what leaves a rank on the link (within one host: a copy
    of it), whichever is longer. Raises RuntimeError if a result is wrong.
    """
    reference = case.reference()
    errors = _check(case, reference)
    data = torch.ones(case.sent_bytes, dtype=torch.uint8)
    place = torch.ones_like(data)
    calls = case.variants if link else case.variants | {"copy": lambda: place.copy_(data)}
    counts = {name: max(1, int(_BATCH_S / _sample(call, 3))) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for run in range(runs):
        for name in names[run % len(names) :] + names[: run % len(names)]:
            times[name].append(_sample(calls[name], counts[name]))
    _check(case, reference)
    if link:
        times["wire"] = [case.sent_bytes / link.bytes_per_s] * runs
    leaving = times["wire"] if link else times.pop("copy")
    times["limit"] = [max(pair) for pair in zip(times["compute_only"], leaving, strict=True)]
    return [_record(case, name, seconds, errors.get(name), link) for name, seconds in times.items()]


def _record(case: Case, variant: str, seconds: list[float], error: float | None, link: Link | None) -> dict[str, Any]:
    tenths = statistics.quantiles(seconds, n=10, method="inclusive")
    return {
        "operator": case.operator,
        "shape": case.shape,
        "dtype": "float32",
        "world": dist.get_world_size(),
        "hosts": link.hosts if link else 1,
        "link_gbps": link.gbps if link else None,
        "variant": variant,
        "median_ms": statistics.median(seconds) * 1e3,
        "p10_ms": tenths[0] * 1e3,
        "p90_ms": tenths[-1] * 1e3,
        "runs": len(seconds),
        "rel_err": error,
    }
