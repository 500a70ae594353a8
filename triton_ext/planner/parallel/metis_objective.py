"""Metis's published formula as an objective of our search: exact, so that the least bound is the least cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..cluster import Cluster
from .layer_tables import Floats, sums
from .metis.bandwidth import Bandwidths
from .metis.stage import Rejection, Row, StageCost, Stages
from .objectives import Prefixes
from .options import Ints, Kinds, KindTables, Masks, Options
from .profiles import BYTES_PER_PARAMETER, Model
from .space import Group, Order


@dataclass(frozen=True, eq=False)
class MetisOptions:
    """Options, and of each what its cost needs beside its layers, in ms."""

    options: Options
    synchronization_ms: Floats
    optimizer_ms: Floats
    batch_generator_ms: Floats


class _MetisKinds(Kinds):
    """Kinds by Metis's rows of a stage: times of layers without forward and backward apart."""

    def __init__(self, stages: Stages, cluster: Cluster) -> None:
        self._stages, self._limits = stages, {t.name: t.memory_bytes for t in cluster.device_types}
        self._numbers: dict[tuple[Row, ...], int] = {}
        self._times: list[Floats] = []
        self._flights: list[Floats] = []

    def of_rows(self, rows: tuple[Row, ...]) -> int:
        rows = tuple(sorted(rows))
        if rows not in self._numbers:
            self._numbers[rows] = len(self._times)
            times = np.max([sums(np.array(self._stages.layer_ms(row)) / 1e3) for row in rows], axis=0)
            flights = np.min([self._fitting(row) for row in rows], axis=0)
            begin, end = np.indices(times.shape)
            impossible = (begin >= end) | (flights < 1)
            self._times.append(np.where(impossible, np.inf, times))
            self._flights.append(np.where(impossible, 0.0, flights))
        return self._numbers[rows]

    def _fitting(self, row: Row) -> Floats:
        point = self._stages.point(row)
        each = sums(np.array(point.activation_memory_bytes or (0,) * len(point.memory_bytes), dtype=float))
        room = self._limits[row.device_type] - sums(np.array(point.memory_bytes, dtype=float))
        with np.errstate(divide="ignore", invalid="ignore"):
            more = np.where(each > 0, np.floor(room / each + 1e-9), np.inf)
        return np.where(room < 0, 0.0, 1 + more)

    @property
    def tables(self) -> KindTables:
        times, flights = np.array(self._times), np.array(self._flights)
        none = np.zeros(1)  # the formula knows no such part
        return KindTables(times, np.where(np.isinf(times), np.inf, 0.0), times, none, times, none, none, none, flights)


def metis_options(
    groups: Sequence[Group], stages: Stages, cluster: Cluster, order: Order, samples: int
) -> MetisOptions | dict[str, int]:
    """The options for micro-batches of so many samples; or, where there are none, groups counted by reason."""
    types = [cluster.devices[device].type for device in order.devices]
    known: dict[tuple[tuple[str, ...], int], StageCost | Rejection] = {}
    kinds = _MetisKinds(stages, cluster)
    rejected: dict[str, int] = {}
    usable, costs, kind = [], [], []
    for index, group in enumerate(groups):
        key = (tuple(types[group.first : group.last]), group.tp)
        if key not in known:
            known[key] = stages.cost(key[0], group.tp, samples)
        cost = known[key]
        if isinstance(cost, Rejection):
            code = cost.code.partition("-")[0]
            rejected[code] = rejected.get(code, 0) + 1
        else:
            usable.append(index)
            costs.append(cost)
            kind.append(kinds.of_rows(cost.rows))
    if not usable:
        return rejected
    chosen = tuple(groups[index] for index in usable)
    made = Options(
        groups=chosen,
        shares=tuple(cost.shares for cost in costs),
        index=np.array(usable),
        first=np.array([group.first for group in chosen]),
        last=np.array([group.last for group in chosen]),
        kind=np.array(kind),
        most=np.array([max(cost.shares) for cost in costs]),
        kinds=kinds,
        rejected=rejected,
    )
    return MetisOptions(
        made,
        np.array([cost.synchronization_ms for cost in costs]),
        np.array([cost.optimizer_ms for cost in costs]),
        np.array([cost.batch_generator_ms for cost in costs]),
    )


class MetisFormula:
    """See `metis.cost`. Columns, in seconds: the slowest stage; all stages, their boundaries and the synchronisation;
    the slowest all-reduce; the slowest update; the batch generator of the first stage so far."""

    columns = 5

    def __init__(
        self,
        made: MetisOptions,
        prefixes: Prefixes,
        model: Model,
        bandwidths: Bandwidths,
        order: Order,
        microbatches: int,
        cost: str,
    ) -> None:
        o = made.options
        self._made, self._o, self._t, self._prefixes = made, o, o.kinds.tables, prefixes
        self._batches, self._layers = microbatches, model.layers
        self._bytes = np.array([0, *model.activation_bytes], dtype=float)  # by the layer that a cut is before
        if cost == "metis-upstream":
            self._bytes /= BYTES_PER_PARAMETER
        self._parameters = sums(np.array(model.parameter_bytes, dtype=float))
        self._tp = np.array([group.tp for group in o.groups])
        dp = np.array([group.dp for group in o.groups])
        # Bytes/ms among the devices [first, last) of the order; of the all-reduce.
        count = len(order.devices)
        self._width = np.full((count + 1, count + 1), np.inf)
        for first in range(count):
            for last in range(first + 1, count + 1):
                self._width[first, last] = bandwidths.of_devices(order.devices[first:last])
        reduce = np.array(
            [bandwidths.data_parallel(order.devices[g.first : g.last], g.tp) if g.dp > 1 else np.inf for g in o.groups]
        )
        self._reduce_s_per_byte = 2 * (dp - 1) / dp / reduce / self._tp / 1e3

    def possible(self, option: Ints, begin: Ints, end: Ints, stages: int, best_s: float) -> Masks:
        kind = self._o.kind[option]
        fits = self._t.flights[kind, begin, end] >= min(stages, self._batches)
        return np.asarray(fits & (self._batches * self._t.slowest_s[kind, begin, end] < best_s))

    def extended(self, rows: Floats, option: Ints, begin: Ints, end: Ints, stages: int, after: Ints) -> Floats:
        made, batches = self._made, self._batches
        time_s = self._t.slowest_s[self._o.kind[option], begin, end]
        if (after < 0).all():
            behind = batches * made.synchronization_ms[option] / 1e3
            rows = np.zeros((self.columns, len(time_s)))
        else:
            size = np.where(end == self._layers - 1, self._bytes[-1] / self._tp[option], self._bytes[end])
            behind = self._o.most[option] * size / self._width[self._o.first[option], self._o.last[after]] / 1e3
        share = (end - begin) / self._layers
        return np.stack(
            [
                np.maximum(rows[0], time_s),
                rows[1] + time_s + behind,
                np.maximum(rows[2], self._reduce_s_per_byte[option] * self._parameters[begin, end]),
                np.maximum(rows[3], 2 * made.optimizer_ms[option] / self._tp[option] * share / 1e3),
                batches * made.batch_generator_ms[option] / 1e3,
            ]
        )

    def total_s(self, rows: Floats) -> Floats:
        return np.asarray((self._batches - 1) * rows[0] + rows[1:].sum(axis=0))

    def key(self, option: Ints) -> Ints:
        return self._o.last[option]  # what the next boundary's bandwidth depends on

    def bound_s(self, rows: Floats, begin: Ints, first: Ints) -> Floats:
        slowest, total = self._prefixes.slowest_s[first, begin], self._prefixes.sum_s[first, begin]
        with np.errstate(invalid="ignore"):  # 0 * inf, for one micro-batch
            least = (self._batches - 1) * np.maximum(rows[0], slowest) + rows[1] + total + rows[2] + rows[3]
        return np.where(begin > 0, least, self.total_s(rows))
