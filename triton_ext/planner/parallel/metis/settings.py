"""What can be set about Metis's search."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ....errors import PlanningError

COSTS = ("metis", "metis-upstream")
MEMORY = ("device", "group")


@dataclass(frozen=True)
class MetisSettings:
    """Defaults of the pruning rules: those of the paper's evaluation as Sailor's authors report it (SOSP 2025).

    min_group_scale_variance, max_permute_len: the two prunes of `groups`.
    cost: "metis" is the published formula with bytes and bytes/s; "metis-upstream" has the public implementation's
    units (float32 elements of activations counted as bytes, 2^20 bytes/ms for a GB/s, replicas tested in place of
    data-parallel groups).
    memory: "device" compares each device's need, with the micro-batches that 1F1B keeps in flight, with its memory;
    "group" compares 5 times one device's need with the memory of the stage's devices together, as published: it admits
    plans that do not fit.
    uneven_splits: a micro-batch whose samples the replicas do not divide evenly is split as evenly as possible; False
    rejects such plans.
    model_missing: points that no profile reaches come from the roofline, and plans that use them say so.
    keep: how many plans are returned. time_limit_s: ends the search with the best so far.
    """

    min_group_scale_variance: float = 0.5
    max_permute_len: int = 10
    cost: str = "metis"
    memory: str = "device"
    uneven_splits: bool = True
    model_missing: bool = False
    max_stages: int | None = None
    keep: int = 20
    time_limit_s: float | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.min_group_scale_variance) and self.min_group_scale_variance >= 0):
            raise PlanningError(f"min_group_scale_variance is {self.min_group_scale_variance}; give 0 or more")
        for name in ("max_permute_len", "keep"):
            if getattr(self, name) < 1:
                raise PlanningError(f"{name} is {getattr(self, name)}; give at least 1")
        if self.max_stages is not None and self.max_stages < 1:
            raise PlanningError(f"max_stages is {self.max_stages}; give at least 1")
        if self.time_limit_s is not None and not self.time_limit_s > 0:
            raise PlanningError(f"time_limit_s is {self.time_limit_s}; give a positive number")
        if self.cost not in COSTS:
            raise PlanningError(f"cost {self.cost!r}; there are {', '.join(COSTS)}")
        if self.memory not in MEMORY:
            raise PlanningError(f"memory {self.memory!r}; there are {', '.join(MEMORY)}")
