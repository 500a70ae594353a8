"""What a search for a parallelism plan returns."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from .plan import ParallelPlan


@dataclass(frozen=True)
class Cost:
    """One training step, in ms, by part; the parts add up."""

    execution_ms: float  # forward and backward of all micro-batches through the pipeline
    pipeline_ms: float = 0.0  # activations and their gradients between stages, as far as exposed
    data_parallel_ms: float = 0.0  # the gradients' all-reduce
    update_ms: float = 0.0  # the optimizer
    synchronization_ms: float = 0.0  # forward-backward synchronisation at the last stage (Metis's fb_sync)
    batch_generator_ms: float = 0.0

    @property
    def total_ms(self) -> float:
        return (
            self.execution_ms
            + self.pipeline_ms
            + self.data_parallel_ms
            + self.update_ms
            + self.synchronization_ms
            + self.batch_generator_ms
        )


@dataclass(frozen=True)
class CostedPlan:
    """A plan with its cost under the search's own model.

    stage_ms: one micro-batch, forward and backward, by stage. memory_bytes: by stage, the largest need of one of its
    devices under that model; () where the model has none. modelled and interpolated: the profile points that the plan
    uses and nobody measured, as "type tp samples".
    """

    plan: ParallelPlan
    cost: Cost
    stage_ms: tuple[float, ...] = ()
    memory_bytes: tuple[int, ...] = ()
    modelled: tuple[str, ...] = ()
    interpolated: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rejected:
    """Plans that cannot be, by reason: how many, and the first of them in words."""

    code: str
    count: int
    example: str


@dataclass(frozen=True)
class SearchResult:
    """Plans, best first (at most as many as asked for), and everything that was left out, with reasons.

    costed: plans with a cost. rejected: counted reasons, by code. pruned: what each pruning rule left out, by rule's
    name. complete: the whole space of the settings was searched. timed_out: it was not, for the time limit came first;
    other limits and a schedule without bounds leave a search incomplete, too. lower_bound_ms: no plan of the space
    costs less (None where the algorithm proves nothing).
    """

    algorithm: str
    plans: tuple[CostedPlan, ...]
    costed: int
    rejected: tuple[Rejected, ...] = ()
    pruned: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    elapsed_s: float = 0.0
    complete: bool = True
    timed_out: bool = False
    lower_bound_ms: float | None = None

    @property
    def best(self) -> CostedPlan | None:
        """None where no plan is feasible: `rejected` says why."""
        return self.plans[0] if self.plans else None

    @property
    def gap(self) -> float:
        """By which fraction the best plan may miss the optimum; 0 where proven, inf without a plan or a bound."""
        if not self.plans or not self.lower_bound_ms:
            return math.inf
        return max(0.0, self.plans[0].cost.total_ms / self.lower_bound_ms - 1)

    @property
    def proven(self) -> bool:
        return bool(self.plans) and self.gap <= 1e-9
