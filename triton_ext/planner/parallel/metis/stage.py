"""What one stage costs with one split of its devices: the point where profiles, devices and batch meet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from ..lookup import Lookup
from ..profiles import Gap, Point


class Row(NamedTuple):
    """Devices of a stage that take the same time: type, degree, samples; `digits`: priced as one pass for each binary
    digit of the samples, Metis's price of a share in a stage of several types."""

    device_type: str
    tp: int
    samples: int
    digits: bool


@dataclass(frozen=True)
class Rejection:
    code: str
    reason: str


@dataclass(frozen=True)
class StageCost:
    """A stage as far as it does not depend on its layers.

    rows: each kind of its devices. shares: samples of each replica. synchronization_ms, optimizer_ms and
    batch_generator_ms: the largest of its devices, for one micro-batch, update, micro-batch.
    """

    rows: tuple[Row, ...]
    shares: tuple[int, ...]
    synchronization_ms: float
    optimizer_ms: float
    batch_generator_ms: float


class Stages:
    """Costs of stages on given profiles; time and memory of rows by layer."""

    def __init__(self, lookup: Lookup, uneven_splits: bool = True) -> None:
        self._lookup = lookup
        self._uneven = uneven_splits
        self.layer_ms = lru_cache(None)(self._layer_ms)

    def cost(self, types: Sequence[str], tp: int, samples: int) -> StageCost | Rejection:
        """types: of the stage's devices by rank. samples: of a micro-batch, to be split among the replicas."""
        shares = self._shares(types, tp, samples)
        if isinstance(shares, Rejection):
            return shares
        if len(set(types)) > 1:
            return self.cost_of_shares(types, tp, shares)
        kinds = sorted(set(shares))  # replicas of equal shares are alike
        found = self.cost_of_shares(tuple(types[:tp]) * len(kinds), tp, kinds)
        return found if isinstance(found, Rejection) else replace(found, shares=shares)

    def cost_of_shares(self, types: Sequence[str], tp: int, shares: Sequence[int]) -> StageCost | Rejection:
        mixed = len(set(types)) > 1
        rows: dict[Row, Point] = {}
        for replica, share in enumerate(shares):
            for device_type in dict.fromkeys(types[replica * tp : (replica + 1) * tp]):
                row = Row(device_type, tp, share, mixed and share & (share - 1) != 0)
                if share == 0 or row in rows:
                    continue
                point = self._lookup.get(device_type, tp, share)
                if isinstance(point, Gap):
                    return Rejection(f"profile-{point.code}", point.reason)
                if row.digits and isinstance(gap := self._digit_gap(row), Gap):
                    return Rejection(f"profile-{gap.code}", gap.reason)
                rows[row] = point
        points = rows.values()
        return StageCost(
            tuple(rows),
            tuple(shares),
            max(0.0, *(point.forward_backward_ms - sum(point.layer_ms) for point in points)),
            max(point.optimizer_ms for point in points),
            max(point.batch_generator_ms for point in points),
        )

    def point(self, row: Row) -> Point:
        point = self._lookup.get(row.device_type, row.tp, row.samples)
        assert isinstance(point, Point)  # rows are made of points
        return point

    def points(self, row: Row) -> tuple[tuple[tuple[str, int, int], Point], ...]:
        """Every point that the row's time and memory come from."""
        sizes = {row.samples, *(_digits(row.samples) if row.digits else ())}
        found = []
        for size in sorted(sizes):
            point = self._lookup.get(row.device_type, row.tp, size)
            assert isinstance(point, Point)
            found.append(((row.device_type, row.tp, size), point))
        return tuple(found)

    def _layer_ms(self, row: Row) -> tuple[float, ...]:
        """Forward and backward of each layer for the row's samples."""
        if not row.digits:
            return self.point(row).layer_ms
        points = [self.point(Row(row.device_type, row.tp, digit, False)) for digit in _digits(row.samples)]
        return tuple(map(sum, zip(*(point.layer_ms for point in points), strict=True)))

    def _digit_gap(self, row: Row) -> Gap | None:
        for digit in _digits(row.samples):
            point = self._lookup.get(row.device_type, row.tp, digit)
            if isinstance(point, Gap):
                return point
        return None

    def _shares(self, types: Sequence[str], tp: int, samples: int) -> tuple[int, ...] | Rejection:
        replicas = len(types) // tp
        if samples < replicas:
            return Rejection("samples", f"{replicas} replicas for the {samples} samples of a micro-batch")
        if len(set(types)) == 1:
            if samples % replicas and not self._uneven:
                return Rejection("divisibility", f"{samples} samples of a micro-batch over {replicas} replicas")
            whole, rest = divmod(samples, replicas)
            return (whole + 1,) * rest + (whole,) * (replicas - rest)
        speeds = []
        for replica in range(replicas):
            slowest = 0.0
            for device_type in dict.fromkeys(types[replica * tp : (replica + 1) * tp]):
                found = self._lookup.smallest(device_type, tp)
                if isinstance(found, Gap):
                    return Rejection(f"profile-{found.code}", found.reason)
                size, point = found
                slowest = max(slowest, sum(point.layer_ms) / size)
            speeds.append(1 / slowest if slowest else 1.0)
        return balanced_shares(speeds, samples)


def balanced_shares(speeds: Sequence[float], samples: int) -> tuple[int, ...]:
    """Metis's data balance: samples in proportion to speed, rounded down, the rest one by one to the largest fractional
    parts (the first of equal ones). No replica goes without: what it needs comes from the largest share."""
    total = sum(speeds)
    exact = [samples * speed / total for speed in speeds]
    shares = [int(share) for share in exact]
    by_fraction = sorted(range(len(shares)), key=lambda replica: (shares[replica] - exact[replica], replica))
    for replica in by_fraction[: samples - sum(shares)]:
        shares[replica] += 1
    while 0 in shares:
        shares[shares.index(max(shares))] -= 1
        shares[shares.index(0)] += 1
    return tuple(shares)


def _digits(samples: int) -> list[int]:
    return [1 << bit for bit in range(samples.bit_length()) if samples >> bit & 1]
