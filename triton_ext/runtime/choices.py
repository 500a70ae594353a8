"""Which schedule a plan runs, where its caller leaves that open: what the planner is asked, and what it answers.

The answer follows from what all ranks have agreed on, so that it is the same on all.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path

from ..errors import ClusterError, PlanError
from ..planner import cluster_file, measurements, presets
from ..planner.cluster import Cluster
from ..planner.schedules import (
    HYSTERESIS,
    ON_CPU,
    ON_GPU,
    UNFUSED,
    Candidate,
    Decision,
    Measurement,
    Request,
    choose,
)
from . import flows
from .transfers import CARD_SLICE_BYTES

CLUSTER_VARIABLE = "TRITON_EXT_CLUSTER"

_TILES_PER_PEER = 64  # a plan does not know its kernel's blocks
_SLICES_WITHIN_A_HOST = 8  # tiles leave one by one: as many pieces as make a difference
_SLICES = (1, 2, 4, 8, 16)  # 32 gain 1 % by the model, and were slower (docs/schedules.md)


@dataclass(frozen=True)
class Wishes:
    """How a plan's caller wants it to run; None leaves it open. compute_s: what its kernel computes for, if known."""

    shots: int | None = None
    schedule: str | None = None
    slices: int | None = None
    compute_s: float | None = None

    def __post_init__(self) -> None:
        if self.shots not in (None, 1, 2):
            raise PlanError(f"shots={self.shots}: an all_reduce takes 1 or 2")
        if self.slices is not None and self.slices < 1:
            raise PlanError(f"slices={self.slices}: give 1 or more")
        if self.compute_s is not None and not 0 <= self.compute_s < float("inf"):
            raise PlanError(f"compute_s={self.compute_s}: give a number of seconds")


@dataclass(frozen=True)
class Execution:
    """What a plan runs. slices: per peer on another host; None: as many as suit the transport."""

    shots: int
    schedule: str
    slices: int | None


@dataclass(frozen=True)
class Known:
    """What rank 0 was told: the cluster of a file (None: there is none), and of the probe that wrote it, the job's rank
    of each device (empty: their numbers are the same), and how long a library's collectives took."""

    cluster: Cluster | None = None
    ranks: tuple[int, ...] = ()
    library: tuple[Measurement, ...] = ()


@dataclass(frozen=True)
class Question:
    """The planner's part of a plan.

    collective: as users call it. hosts, global_ranks: of each rank. tensor_bytes: of the largest tensor that a rank
    computes. wire_dtype: of partial values of a sum.
    """

    collective: str
    tensor_bytes: int
    dtype: str
    wire_dtype: str
    hosts: tuple[str, ...]
    global_ranks: tuple[int, ...]
    wishes: Wishes
    known: Known = Known()
    on_cpu: bool = True
    root: int = 0
    destinations: tuple[int | None, ...] = ()

    @property
    def is_open(self) -> bool:
        """Whether there is more than one answer."""
        request = self._request
        barred = {name for name, _ in request.barred}
        return len(self.hosts) > 1 and (len(request.executable - barred) > 1 or len(request.slices) > 1)

    def execution(self) -> Execution:
        """The answer. Raises PlanError if the cluster file is of another group."""
        wishes = self.wishes
        if not self.is_open:
            shots = wishes.shots or (2 if self.collective == "all_reduce" else 1)
            return Execution(shots, wishes.schedule or flows.DIRECT, wishes.slices)
        name, slices, _ = self.decide().choice
        schedule = flows.HIERARCHICAL if name == "hierarchical" else wishes.schedule or flows.DIRECT
        shots = 1 if name == "one_shot" else 2
        return Execution(shots, schedule, slices if self._cuts_slices else wishes.slices)

    def decide(self) -> Decision:
        """The planner's decision. A computation of unknown length is taken to be as long as the communication."""
        request = self._request_with_time
        if (unfused := self._unfused) is not None:
            text = f"plans are fused; the computation, then a library, take {unfused.total_s * 1e6:.2f} us in all"
            request = replace(request, barred=(*request.barred, (UNFUSED, f"{text}, {unfused.basis}")))
        return choose(request, self._placed_cluster)

    @cached_property
    def is_unfused_faster(self) -> bool:
        """Whether the computation, then a library's collective, take less time, and more than a bit: as far as that
        library was measured for such tensors. The model alone is no reason to give up a fused kernel."""
        unfused = self._unfused
        return unfused is not None and unfused.total_s < (1 - HYSTERESIS) * self.decide().chosen.total_s

    @cached_property
    def _unfused(self) -> Candidate | None:
        if not self.known.library:
            return None
        request = replace(self._request_with_time, executable=frozenset({UNFUSED}), barred=())
        found = choose(request, self._placed_cluster, measured=self.known.library).chosen
        return found if found.is_measured else None

    @cached_property
    def _request_with_time(self) -> Request:
        request = self._request
        if self.wishes.compute_s is not None:
            return request
        alone_s = choose(request, self._placed_cluster).chosen.standalone_s
        return replace(request, tile_compute_s=alone_s / request.tiles)

    @property
    def _is_between_hosts(self) -> bool:
        return len(set(self.hosts)) > 1

    @property
    def _cuts_slices(self) -> bool:
        """Kernels on GPUs send slices of one size, however many."""
        return self._is_between_hosts and self.on_cpu

    @cached_property
    def _request(self) -> Request:
        wishes, world = self.wishes, len(self.hosts)
        names = {"one_shot"} | ({"two_shot"} if self.collective == "all_reduce" else set())
        if self.collective != "put":
            names.add("hierarchical")
        slices: tuple[int, ...] = (_SLICES_WITHIN_A_HOST,)
        if self._cuts_slices:
            slices = _SLICES if wishes.slices is None else (wishes.slices,)
        elif self._is_between_hosts:
            slices = (wishes.slices or min(max(self.tensor_bytes // world // CARD_SLICE_BYTES, 1), _TILES_PER_PEER),)
        tiles = max(_TILES_PER_PEER, *slices) * world
        return Request(
            self.collective,
            self.tensor_bytes,
            self.dtype,
            tiles,
            (wishes.compute_s or 0.0) / tiles,
            tuple(self._devices),
            frozenset(names),
            slices,
            ("interleaved" if self._cuts_slices else "remote_first",),
            self.root,
            self.destinations if self.collective == "put" else (),
            costs=ON_CPU if self.on_cpu else ON_GPU,
            barred=self._barred,
            wire_dtype=self.wire_dtype,
        )

    @property
    def _barred(self) -> tuple[tuple[str, str], ...]:
        wishes, barred = self.wishes, {UNFUSED: "plans are fused"}
        could_be_hierarchical = self._is_between_hosts and len(set(self.hosts)) < len(self.hosts)
        if wishes.shots is not None:
            barred["one_shot" if wishes.shots == 2 else "two_shot"] = f"the caller asked for shots={wishes.shots}"
        if could_be_hierarchical:
            if not self.on_cpu:
                barred["hierarchical"] = "kernels on GPUs send their slices themselves"
            elif wishes.schedule == flows.HIERARCHICAL:
                for name in ("one_shot", "two_shot"):
                    barred[name] = f"the caller asked for schedule={wishes.schedule!r}"
            elif wishes.schedule == flows.DIRECT or wishes.shots == 1:
                asked = f"schedule={wishes.schedule!r}" if wishes.schedule else "shots=1"
                barred["hierarchical"] = f"the caller asked for {asked}"
            elif self.collective in ("all_reduce", "reduce_scatter"):
                barred["hierarchical"] = "it does not sum in the order of ranks; ask for schedule='hierarchical'"
        return tuple(barred.items())

    @cached_property
    def _devices(self) -> list[int]:
        """Of each rank, its device in the cluster."""
        if self.known.cluster is None:
            # Host by host, in the order of their first ranks.
            first = [self.hosts.index(host) for host in self.hosts]
            order = sorted(range(len(self.hosts)), key=lambda rank: (first[rank], rank))
            return [order.index(rank) for rank in range(len(self.hosts))]
        described = self.known.cluster.devices
        of_rank = {rank: device for device, rank in enumerate(self.known.ranks or range(len(described)))}
        missing = [rank for rank in self.global_ranks if not 0 <= of_rank.get(rank, -1) < len(described)]
        if missing:
            raise PlanError(
                f"{CLUSTER_VARIABLE}: the cluster has {len(described)} devices, and rank {missing[-1]} of the job "
                "makes a plan; give a file of this job's ranks (triton-ext probe), or none"
            )
        devices = [of_rank[rank] for rank in self.global_ranks]
        nodes = [described[device].node for device in devices]
        for rank, other in ((a, b) for b in range(len(nodes)) for a in range(b)):
            if (nodes[rank] == nodes[other]) != (self.hosts[rank] == self.hosts[other]):
                together = "on one host" if self.hosts[rank] == self.hosts[other] else "on different hosts"
                ranks = f"ranks {self.global_ranks[rank]} and {self.global_ranks[other]}"
                raise PlanError(
                    f"{CLUSTER_VARIABLE}: {ranks} of the job are {together}, devices {devices[rank]} and "
                    f"{devices[other]} of the cluster are not; give a file of this job's ranks with the measurements "
                    "beside it (triton-ext probe writes both), or none"
                )
        return devices

    @property
    def _placed_cluster(self) -> Cluster:
        if self.known.cluster is not None:
            return self.known.cluster
        return _assumed_cluster(tuple(self.hosts.count(host) for host in dict.fromkeys(self.hosts)), self.on_cpu)


@lru_cache(64)
def _assumed_cluster(ranks_per_host: Sequence[int], on_cpu: bool) -> Cluster:
    return presets.cpu_hosts(ranks_per_host) if on_cpu else presets.gpu_hosts(ranks_per_host)


def known() -> Known | str:
    """What TRITON_EXT_CLUSTER names a file of, and the measurements beside that; or, for all ranks to hear, what is
    wrong with it."""
    name = os.environ.get(CLUSTER_VARIABLE)
    if not name:
        return Known()
    path = Path(name)
    measured = measurements.path_beside(path)
    try:
        return _load(path, path.stat().st_mtime_ns, measured.stat().st_mtime_ns if measured.exists() else None)
    except (OSError, ClusterError) as error:
        return f"{CLUSTER_VARIABLE}={name}: {error}"


def is_library_known() -> bool:
    """Whether this process was told how long a library's collectives take."""
    found = known()
    return isinstance(found, Known) and bool(found.library)


@lru_cache(8)
def _load(path: Path, _changed_ns: int, measured_ns: int | None) -> Known:
    cluster = cluster_file.load(path)
    if measured_ns is None:
        return Known(cluster)
    measured = measurements.load(measurements.path_beside(path))
    return Known(cluster, tuple(rank for _, ranks in measured.hosts for rank in ranks), measured.unfused())
