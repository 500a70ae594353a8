"""What a collective costs besides latency and bandwidth of links."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...errors import PlanningError


def not_negative(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise PlanningError(f"{name} is {value}; give 0 or more")


@dataclass(frozen=True)
class Costs:
    """Within a node: put_s of a sender, for each message, and flag_s of each step: the signal that follows the data and
    the wait for it. Between nodes: send_s and arrive_s likewise, and stolen_s, what each message takes from the
    computation of both its ranks, where no card sends by itself. sum_bytes_per_s: at which a rank adds up what it was
    sent. Of the unfused path's library: library_call_s once, library_step_s for each step.
    """

    put_s: float = 0.0
    flag_s: float = 0.0
    send_s: float = 0.0
    arrive_s: float = 0.0
    stolen_s: float = 0.0
    sum_bytes_per_s: float = math.inf
    library_call_s: float = 0.0
    library_step_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("put_s", "flag_s", "send_s", "arrive_s", "stolen_s", "library_call_s", "library_step_s"):
            not_negative(name, getattr(self, name))
        if not self.sum_bytes_per_s > 0:
            raise PlanningError(f"sum_bytes_per_s is {self.sum_bytes_per_s}; give a positive number")


NONE = Costs()
#: Processes on CPUs: stores to shared memory cost no message, and between hosts a thread of the host sends through a
#: socket. Orders of magnitude, adjusted to benchmarks/schedules.py on a busy machine of two cores (docs/schedules.md).
ON_CPU = Costs(0.0, 10e-6, 50e-6, 300e-6, 50e-6, 10e9, library_call_s=100e-6, library_step_s=50e-6)
#: Kernels on GPUs: assumed orders of magnitude, not measured.
ON_GPU = Costs(1e-6, 2e-6, 2e-6, 3e-6, 0.0, 500e9, library_call_s=10e-6, library_step_s=4e-6)
