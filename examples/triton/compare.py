"""What the programs here share: where to run, and a comparison of two calls by result and by time."""

import statistics
import time
from collections.abc import Callable

import torch
import triton

DEVICE = triton.runtime.driver.active.get_active_torch_device()
ON_CPU = DEVICE.type == "cpu"
Call = Callable[[], torch.Tensor]


def processors() -> int:
    """How many programs run at a time: what a kernel with a fixed number of programs launches."""
    return torch.get_num_threads() if ON_CPU else torch.cuda.get_device_properties(DEVICE).multi_processor_count


def largest_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    return (result.double() - expected.double()).abs().max().item()


def compare(name: str, ours: Call, theirs: Call, tolerance: float, runs: int = 9) -> None:
    """Check that both calls give the same and print how far apart they are, and how their times compare."""
    error = largest_error(ours(), theirs())
    assert error <= tolerance, f"{name}: the largest error is {error:.2g}"
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(runs):  # by turns, so that both meet the same disturbances
        for call, seconds in zip((ours, theirs), times, strict=True):
            start = time.perf_counter()
            call()
            if not ON_CPU:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
    mine, other = (statistics.median(seconds) for seconds in times)
    print(f"{name}: largest error {error:.1e}, {mine * 1e3:.2f} ms, torch / ours {other / mine:.2f}", flush=True)
