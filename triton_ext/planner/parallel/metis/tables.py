"""Tables of everything that Metis's cost looks up, so that many plans are costed at once.

A layout is an order of the device types: ranks go type by type, in the cluster's order within a type. A configuration
is a stage's ranks in a layout, its degree and its samples; it exists once, and points to rows: kinds of devices with
time and memory by layer, as prefix sums.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...cluster import Cluster
from ..profiles import BYTES_PER_PARAMETER, Model
from .balance import Floats, Ints
from .bandwidth import Bandwidths
from .settings import MetisSettings
from .stage import Rejection, Row, StageCost, Stages

_GROUP_FACTOR = 5.0  # of the published comparison with a group's memory


class Layout:
    """Devices by rank, and the bandwidth of any interval of ranks."""

    def __init__(self, cluster: Cluster, order: Sequence[str], bandwidths: Bandwidths) -> None:
        devices = [device for name in order for device in cluster.devices if device.type == name]
        self._all_reduce: dict[tuple[int, int, int], float] = {}
        self.devices = tuple(device.index for device in devices)
        self.types = tuple(device.type for device in devices)
        nodes = [device.node for device in devices]
        # By rank, where the run of its type ends: equal stages are recognised by the lengths of their runs.
        self.run_end = [len(nodes)] * len(nodes)
        for rank in range(len(nodes) - 2, -1, -1):
            same = self.types[rank] == self.types[rank + 1]
            self.run_end[rank] = self.run_end[rank + 1] if same else rank + 1
        segments = [nodes[0]]  # runs of ranks on one node
        self.segment = np.zeros(len(nodes), np.int64)
        for rank, node in enumerate(nodes[1:], 1):
            if node != segments[-1]:
                segments.append(node)
            self.segment[rank] = len(segments) - 1
        self.bandwidth = _interval_bandwidths(segments, bandwidths)  # bytes/ms, segment x segment

    def all_reduce_bandwidth(self, start: int, end: int, tp: int, bandwidths: Bandwidths) -> float:
        """Bytes/ms of the slowest data-parallel group of a stage of ranks [start, end)."""
        key = (start, end, tp)
        found = self._all_reduce.get(key)
        if found is None:
            found = self._all_reduce[key] = bandwidths.data_parallel(self.devices[start:end], tp)
        return found

    def runs(self, start: int, end: int) -> tuple[tuple[str, int], ...]:
        """The types of ranks [start, end): each with its number of consecutive ranks."""
        found = []
        while start < end:
            stop = min(end, self.run_end[start])
            found.append((self.types[start], stop - start))
            start = stop
        return tuple(found)


def _interval_bandwidths(segments: Sequence[int], bandwidths: Bandwidths) -> Floats:
    count = len(segments)
    slowest = np.full((count, count), np.inf)
    for width in range(1, count):
        for low in range(count - width):
            high = low + width
            pair = np.inf
            if segments[low] != segments[high]:
                pair = bandwidths.of_nodes((segments[low], segments[high]))
            slowest[low, high] = min(slowest[low + 1, high], slowest[low, high - 1], pair)
    for low, high in np.argwhere(np.isinf(slowest)):
        slowest[low, high] = bandwidths.of_nodes((segments[low],))
    return slowest


class Tables:
    """The configurations of a search, made when first asked for.

    By configuration: code (0, or 1 + index into `rejections`), rows (index, repeated to fill up), memory_scale (need in
    bytes to need over memory), and what the cost needs.
    """

    def __init__(
        self,
        layouts: Sequence[Layout],
        group_sizes: Sequence[int],
        samples: Sequence[int],
        stages: Stages,
        cluster: Cluster,
        model: Model,
        settings: MetisSettings,
        bandwidths: Bandwidths,
    ) -> None:
        self.layouts, self.samples = layouts, samples
        self.rejections: list[Rejection] = []
        self.row_names: list[Row] = []
        self._group_sizes, self._stages = group_sizes, stages
        self._memory_bytes = {device_type.name: device_type.memory_bytes for device_type in cluster.device_types}
        self._settings, self._bandwidths = settings, bandwidths
        self._levels = max(group_sizes).bit_length()
        self._ranks = len(cluster.devices)
        self._ids = np.full(len(layouts) * self._ranks * len(group_sizes) * self._levels * len(samples), -1, np.int32)
        self._columns = 1
        self._made: dict[tuple[object, ...], int] = {}
        self._masks = np.full(len(self._ids) // self._levels, -1, np.int64)
        self._rows: dict[Row, int] = {}
        layers = model.layers
        self.row_ms = np.empty((0, layers + 1))
        self.row_memory = np.empty((0, layers + 1))
        self.row_activations = np.empty((0, layers + 1))
        self.count = 0
        self.code = np.empty(0, np.int64)
        self.rows = np.empty((0, 1), np.int64)
        self.row_count = np.empty(0, np.int64)
        self.memory_scale = np.empty((0, 1))
        # capacity (1 / ms of all layers), largest share, degree, synchronization, update, batch generator, ms per
        # byte of parameters in an all-reduce, bytes of memory
        self.numbers = np.empty((8, 0))
        unit = 1 / BYTES_PER_PARAMETER if settings.cost == "metis-upstream" else 1.0
        self.parameters = _prefix(model.parameter_bytes)
        handed_on = np.array((0.0, *model.activation_bytes)) * unit
        self.handed_on = handed_on  # by cut: of the layer before it
        self.head_output = float(handed_on[-1])

    def ids(self, layout: Ints, start: Ints, size: Ints, level: Ints | int, samples: Ints) -> Ints:
        """Configurations of stages: by layout, first rank, index of the group's size, exponent of the degree and index
        of the samples; arrays of one shape, or that broadcast to it."""
        key = ((layout * self._ranks + start) * len(self._group_sizes) + size) * self._levels + level
        key = key * len(self.samples) + samples
        found = self._ids[key]
        missing = distinct(key[found < 0])
        if missing.size:
            self._reserve(len(missing))
            for number in missing.tolist():
                self._ids[number] = self._make(number)
            found = self._ids[key]
        return found.astype(np.int64)

    def levels(self, layout: Ints, start: Ints, size: Ints, samples: Ints) -> Ints:
        """Of stages: the exponents of the degrees with which they can run at all, as bits."""
        key = ((layout * self._ranks + start) * len(self._group_sizes) + size) * len(self.samples) + samples
        missing = distinct(key[self._masks[key] < 0])
        if missing.size:
            rest, which = np.divmod(missing, len(self.samples))
            rest, sizes = np.divmod(rest, len(self._group_sizes))
            layouts, starts = np.divmod(rest, self._ranks)
            masks = np.zeros(len(missing), np.int64)
            devices = np.array(self._group_sizes)[sizes]
            for level in range(self._levels):
                possible = np.flatnonzero(devices % (1 << level) == 0)
                ids = self.ids(layouts[possible], starts[possible], sizes[possible], level, which[possible])
                masks[possible] |= (self.code[ids] == 0).astype(np.int64) << level
            self._masks[missing] = masks
        return self._masks[key]

    def _reserve(self, more: int) -> None:
        room = len(self.code) - self.count
        if more > room:
            extra = max(more, len(self.code), 256)
            self.code = np.concatenate((self.code, np.zeros(extra, np.int64)))
            self.row_count = np.concatenate((self.row_count, np.ones(extra, np.int64)))
            self.rows = np.concatenate((self.rows, np.zeros((extra, self._columns), np.int64)))
            self.memory_scale = np.concatenate((self.memory_scale, np.zeros((extra, self._columns))))
            self.numbers = np.concatenate((self.numbers, np.zeros((8, extra))), axis=1)

    def _make(self, key: int) -> int:
        """The configuration of a key; an equal one that is there already, if any."""
        key, which = divmod(key, len(self.samples))
        key, level = divmod(key, self._levels)
        key, size = divmod(key, len(self._group_sizes))
        number, start = divmod(key, self._ranks)
        layout, samples, tp = self.layouts[number], self.samples[which], 1 << level
        end = start + self._group_sizes[size]
        dp = (end - start) // tp
        kind: tuple[object, ...] = (dp, samples)  # fewer samples than replicas: whichever these are
        if dp <= samples:
            width = layout.all_reduce_bandwidth(start, end, tp, self._bandwidths) if dp > 1 else np.inf
            kind = (layout.runs(start, end), tp, samples, width)
        found = self._made.get(kind)
        if found is None:
            found = self._made[kind] = self.count
            self.count += 1
            cost = self._stages.cost(layout.types[start:end], tp, samples)
            if isinstance(cost, Rejection):
                self.rejections.append(cost)
                self.code[found] = len(self.rejections)
            else:
                self._fill(found, cost, layout.types[start:end], tp, 2 * (dp - 1) / dp / tp / width)
        return found

    def _fill(self, index: int, cost: StageCost, types: Sequence[str], tp: int, all_reduce: float) -> None:
        rows = [self._row(row) for row in cost.rows]
        self._widen(len(rows))
        total = max(self.row_ms[row, -1] for row in rows)
        memory = sum(self._memory_bytes[name] for name in types)
        if self._settings.memory == "group":
            scales = [_GROUP_FACTOR / memory] * len(rows)
        else:
            scales = [1 / self._memory_bytes[row.device_type] for row in cost.rows]
        fill = self._columns - len(rows)
        self.rows[index] = rows + rows[:1] * fill
        self.memory_scale[index] = scales + scales[:1] * fill
        self.row_count[index] = len(rows)
        self.numbers[:, index] = (
            1 / total if total else 1.0,
            max(cost.shares),
            tp,
            cost.synchronization_ms,
            2 * cost.optimizer_ms / tp,
            cost.batch_generator_ms,
            all_reduce,
            memory,
        )

    def _row(self, row: Row) -> int:
        index = self._rows.get(row)
        if index is None:
            index = self._rows[row] = len(self.row_names)
            self.row_names.append(row)
            point = self._stages.point(row)
            activations = point.activation_memory_bytes or (0,) * len(point.memory_bytes)
            self.row_ms = np.vstack((self.row_ms, _prefix(self._stages.layer_ms(row))))
            self.row_memory = np.vstack((self.row_memory, _prefix(point.memory_bytes)))
            self.row_activations = np.vstack((self.row_activations, _prefix(activations)))
        return index

    def _widen(self, columns: int) -> None:
        if columns > self._columns:
            extra = columns - self._columns
            self.rows = np.hstack((self.rows, np.repeat(self.rows[:, :1], extra, axis=1)))
            self.memory_scale = np.hstack((self.memory_scale, np.repeat(self.memory_scale[:, :1], extra, axis=1)))
            self._columns = columns


def distinct(values: Ints) -> Ints:
    """Ascending, each once: as np.unique, which is slower to start."""
    ordered = np.sort(values, axis=None)
    return ordered[np.concatenate(([True], ordered[1:] != ordered[:-1]))] if ordered.size else ordered


def _prefix(values: Sequence[float]) -> Floats:
    return np.concatenate(([0.0], np.cumsum(np.asarray(values, np.float64))))


class Batch:
    """Configurations of many plans (stages x plans), ready to be balanced and costed."""

    def __init__(self, tables: Tables, ids: Ints, batches: Ints, bandwidth: Floats) -> None:
        """batches: micro-batches of each plan. bandwidth: of each cut (stages - 1 x plans), bytes/ms."""
        self._tables, self._ids, self._batches, self._bandwidth = tables, ids, batches, bandwidth
        stages = len(ids)
        columns = int(tables.row_count[ids].max())
        width = tables.row_ms.shape[1]
        # Positions of row 0's layer 0 in the flat tables, one array for each row of a configuration.
        self._rows = [tables.rows[:, column][ids] * width for column in range(columns)]
        self._scales = [tables.memory_scale[:, column][ids] for column in range(columns)]
        remaining = np.arange(stages, 0, -1)[:, None]
        flying = np.minimum(remaining, batches[None, :]) - 1.0
        self._further = np.zeros_like(flying) if tables._settings.memory == "group" else flying
        self.capacity = tables.numbers[0][ids]
        self.memory = tables.numbers[7][ids]

    def memory_ratio(self, edges: Ints, which: Ints) -> Floats:
        memory, activations = self._tables.row_memory.ravel(), self._tables.row_activations.ravel()
        further = self._further[:, which]
        ratio: Floats | None = None
        for rows, scales in zip(self._rows, self._scales, strict=True):
            begin, end = rows[:, which] + edges[:-1], rows[:, which] + edges[1:]
            need = memory[end] - memory[begin] + further * (activations[end] - activations[begin])
            need *= scales[:, which]
            ratio = need if ratio is None else np.maximum(ratio, need)
        assert ratio is not None  # a configuration has a row
        return ratio

    def cost(self, edges: Ints, which: Ints) -> Floats:
        """The six parts of `result.Cost`, in its order, by plan."""
        tables, ids, batches = self._tables, self._ids[:, which], self._batches[which]
        times: Floats | None = None
        flat = tables.row_ms.ravel()
        for rows in self._rows:
            time = flat[rows[:, which] + edges[1:]] - flat[rows[:, which] + edges[:-1]]
            times = time if times is None else np.maximum(times, time)
        assert times is not None
        _, share, tp, synchronization, update, generator, all_reduce, _ = tables.numbers
        parts = np.zeros((6, len(which)))
        parts[0] = (batches - 1) * times.max(axis=0) + times.sum(axis=0)
        if len(ids) > 1:
            cuts = edges[1:-1]
            layers = len(tables.handed_on) - 1
            size = tables.handed_on[cuts]
            size = np.where(cuts == layers - 1, tables.head_output / tp[ids[:-1]], size)
            parts[1] = (size * share[ids[:-1]] / self._bandwidth[:, which]).sum(axis=0)
        held = tables.parameters[edges[1:]] - tables.parameters[edges[:-1]]
        parts[2] = (all_reduce[ids] * held).max(axis=0)
        parts[3] = (update[ids] * (np.diff(edges, axis=0) / (len(tables.handed_on) - 1))).max(axis=0)
        parts[4] = batches * synchronization[ids[-1]]
        parts[5] = batches * generator[ids[0]]
        return parts
