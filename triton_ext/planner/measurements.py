"""What a group of ranks was measured to do: transfers between them at several sizes, and each rank's device.

`triton-ext probe` makes them; `cluster` turns them into the cluster model, and whoever has a use for measured points
takes them as they are.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from ..errors import ClusterError
from . import documents
from .documents import Count, Entry, Name, Positive
from .schedules import UNFUSED, Measurement

Transport = Literal["messages", "memory"]  # torch.distributed's send and recv; stores to the peer's memory
Load = Literal["alone", "both_ways", "all_pairs"]  # what else is on the way at the same time

_LATENCY_BOUND = 4.0  # times as long as the smallest message: from here on bandwidth counts
_FITTED_SIZES = 3


@dataclass(frozen=True)
class Point:
    """One transfer of `bytes`: the median of `repetitions`, and the fastest one."""

    bytes: int
    seconds: float
    fastest_s: float
    repetitions: int


@dataclass(frozen=True)
class Line:
    """seconds = latency_s + bytes / bandwidth_bytes_per_s; `error` is the largest relative deviation of a point."""

    latency_s: float
    bandwidth_bytes_per_s: float
    error: float


@dataclass(frozen=True)
class Transfer:
    """Points from one rank to another, by size."""

    source: int
    destination: int
    transport: Transport
    load: Load
    points: tuple[Point, ...]

    @cached_property
    def line(self) -> Line:
        return fit(self.points)


@dataclass(frozen=True)
class RankFigures:
    """A rank: its host, its device, and what that does while all ranks are at it.

    device_type: as `triton-ext profile` names it. memory_bytes is what one rank can use: of a host's memory, its share.
    """

    host: str
    device: str
    device_type: str
    threads: int
    memory_bytes: int
    float32_flop_per_s: float
    bfloat16_flop_per_s: float
    memory_bandwidth_bytes_per_s: float


@dataclass(frozen=True)
class CollectiveTime:
    """A library's collective over the whole group: the median of `repetitions`, and the fastest one; `tensor_bytes` as
    `schedules.Request` has them."""

    collective: str
    tensor_bytes: int
    seconds: float
    fastest_s: float
    repetitions: int


@dataclass(frozen=True)
class Measurements:
    """Of one group: its ranks in order, the transfers between them, and the collectives of all of them."""

    backend: str
    ranks: tuple[RankFigures, ...]
    transfers: tuple[Transfer, ...]
    collectives: tuple[CollectiveTime, ...] = ()

    def unfused(self) -> tuple[Measurement, ...]:
        """The collectives as what `schedules.choose` takes in place of its model of the unfused path."""
        world = len(self.ranks)
        return tuple(Measurement(c.collective, UNFUSED, world, c.tensor_bytes, c.seconds) for c in self.collectives)

    def transfer(
        self, source: int, destination: int, transport: Transport = "messages", load: Load = "alone"
    ) -> Transfer | None:
        """The transfer measured so; None if it was not."""
        return self._by_key.get((source, destination, transport, load))

    @cached_property
    def hosts(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Each host with its ranks, in the order of their first ranks."""
        members: dict[str, list[int]] = {}
        for number, rank in enumerate(self.ranks):
            members.setdefault(rank.host, []).append(number)
        return tuple((host, tuple(ranks)) for host, ranks in members.items())

    @cached_property
    def _by_key(self) -> dict[tuple[int, int, str, str], Transfer]:
        return {(t.source, t.destination, t.transport, t.load): t for t in self.transfers}


def fit(points: Sequence[Point]) -> Line:
    """The latency is the smallest message's time without its bytes. The bandwidth has the least squared relative errors
    at the three largest sizes, of those that take at least four times as long; where none does, it is that of the bytes
    by which the largest is longer than the smallest, or, if it takes no longer, of its whole time."""
    if not points:
        raise ClusterError("a transfer without points: it cannot be fitted")
    ordered = sorted(points, key=lambda point: point.bytes)
    smallest_s = ordered[0].seconds
    large = [point for point in ordered if point.seconds >= _LATENCY_BOUND * smallest_s][-_FITTED_SIZES:]
    if large:
        weights = [point.bytes / point.seconds for point in large]
        shares = [1 - smallest_s / point.seconds for point in large]
        slope = sum(w * s for w, s in zip(weights, shares, strict=True)) / sum(w * w for w in weights)
    else:  # at all sizes the latency is most of the time
        more_s, more_bytes = ordered[-1].seconds - smallest_s, ordered[-1].bytes - ordered[0].bytes
        slope = more_s / more_bytes if more_s > 0 and more_bytes else ordered[-1].seconds / ordered[-1].bytes
    latency_s = max(smallest_s - ordered[0].bytes * slope, 0.0)
    error = max(abs((latency_s + point.bytes * slope) / point.seconds - 1) for point in ordered)
    return Line(latency_s, 1 / slope, error)


def path_beside(cluster_file: Path) -> Path:
    """Where the measurements that a cluster file was made from are, if nothing else is said."""
    return cluster_file.with_name(f"{cluster_file.stem}.measured.json")


def dump(measurements: Measurements, path: Path) -> None:
    """Write measurements so that `load` gives them back, each transfer with its fitted line for whoever reads it."""
    transfers = [{**dataclasses.asdict(t), "line": dataclasses.asdict(t.line)} for t in measurements.transfers]
    ranks = [dataclasses.asdict(rank) for rank in measurements.ranks]
    collectives = [dataclasses.asdict(each) for each in measurements.collectives]
    data = {"format": 1, "backend": measurements.backend, "ranks": ranks, "transfers": transfers}
    data |= {"collectives": collectives}
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def load(path: Path) -> Measurements:
    """The measurements of a JSON file. ClusterError names the file and the field of what is wrong."""
    data = documents.load_json(path, ClusterError)
    document = documents.check(_Document, data, str(path), "file of measurements", ClusterError)
    transfers = tuple(
        Transfer(t.source, t.destination, t.transport, t.load, tuple(Point(**p.model_dump()) for p in t.points))
        for t in document.transfers
    )
    for number, transfer in enumerate(transfers):
        if max(transfer.source, transfer.destination) >= len(document.ranks):
            raise ClusterError(
                f"{path}: transfers[{number}]: from {transfer.source} to {transfer.destination}, of "
                f"{len(document.ranks)} ranks"
            )
    ranks = tuple(RankFigures(**rank.model_dump()) for rank in document.ranks)
    collectives = tuple(CollectiveTime(**each.model_dump()) for each in document.collectives)
    return Measurements(document.backend, ranks, transfers, collectives)


_Index = Annotated[int, Field(ge=0)]


class _Point(Entry):
    bytes: Count
    seconds: Positive
    fastest_s: Positive
    repetitions: Count


class _Line(Entry):
    latency_s: float
    bandwidth_bytes_per_s: float
    error: float


class _Transfer(Entry):
    source: _Index
    destination: _Index
    transport: Transport
    load: Load
    points: Annotated[list[_Point], Field(min_length=1)]
    line: _Line | None = None  # for readers; made again from the points


class _Rank(Entry):
    host: str
    device: str
    device_type: Name
    threads: Count
    memory_bytes: Count
    float32_flop_per_s: Positive
    bfloat16_flop_per_s: Positive
    memory_bandwidth_bytes_per_s: Positive


class _CollectiveTime(Entry):
    collective: Name
    tensor_bytes: Count
    seconds: Positive
    fastest_s: Positive
    repetitions: Count


class _Document(Entry):
    format: Literal[1]
    backend: str
    ranks: Annotated[list[_Rank], Field(min_length=1)]
    transfers: list[_Transfer]
    collectives: list[_CollectiveTime] = Field(default_factory=list)
