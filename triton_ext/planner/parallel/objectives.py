"""What a search minimises, built up stage by stage from the last one to the first.

A partial plan (stages that compute the last layers on the last devices) is a row of numbers. Stages are put before it;
every number can only grow with the numbers it comes from, so a row that is nowhere smaller than another of the same
state can never become the better plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from .layer_tables import Floats
from .options import Ints, Masks, Network, Options


class Objective(Protocol):
    """Over one choice's options; times in seconds."""

    columns: int

    def possible(self, option: Ints, begin: Ints, end: Ints, stages: int, best_s: float) -> Masks:
        """Whether layers [begin, end) on an option, `stages` from the pipeline's end, fit into memory and can be part
        of a plan that takes less than best_s."""

    def extended(self, rows: Floats, option: Ints, begin: Ints, end: Ints, stages: int, after: Ints) -> Floats:
        """(columns, n): rows with one more stage in front; `after` is the option of the stage behind it (-1: none)."""

    def total_s(self, rows: Floats) -> Floats:
        """(n,): the objective, if nothing were put in front."""

    def key(self, option: Ints) -> Ints:
        """(n,): rows with one key, layers and devices may be compared; by the option of their first stage."""

    def bound_s(self, rows: Floats, begin: Ints, first: Ints) -> Floats:
        """(n,): no plan that has these rows' stages behind layers [0, begin) on devices [0, first) takes less."""


class Prefixes:
    """For layers [0, l) on devices [0, d), as [d, l]: no way to compute them is better in any of three respects.

    slowest_s: its slowest stage, for one micro-batch; sum_s: all its stages, forward and backward; forward_s: forward.
    0 for no layers on no devices, inf where there is no way.
    """

    def __init__(self, options: Options, devices: int, layers: int, allow_unused: bool) -> None:
        shape = (devices + 1, layers + 1)
        self.slowest_s, self.sum_s, self.forward_s = (
            np.full(shape, np.inf),
            np.full(shape, np.inf),
            np.full(shape, np.inf),
        )
        for table in (self.slowest_s, self.sum_s, self.forward_s):
            table[: devices + 1 if allow_unused else 1, 0] = 0.0
        tables = options.kinds.tables
        both = tables.least_forward_s + tables.least_backward_s
        for last in range(1, devices + 1):
            chosen = np.flatnonzero(options.last == last)
            # Groups of equal cost behind equal devices are common.
            pairs = np.unique(np.stack([options.first[chosen], options.kind[chosen]]), axis=1) if len(chosen) else None
            if pairs is not None:
                first, kind = pairs
                slowest = np.maximum(self.slowest_s[first][:, :, None], tables.slowest_s[kind])
                self.slowest_s[last] = np.minimum(self.slowest_s[last], slowest.min(axis=(0, 1)))
                total = self.sum_s[first][:, :, None] + both[kind]
                self.sum_s[last] = np.minimum(self.sum_s[last], total.min(axis=(0, 1)))
                forward = self.forward_s[first][:, :, None] + tables.least_forward_s[kind]
                self.forward_s[last] = np.minimum(self.forward_s[last], forward.min(axis=(0, 1)))
            if allow_unused:
                for table in (self.slowest_s, self.sum_s, self.forward_s):
                    table[last] = np.minimum(table[last], table[last - 1])

    @property
    def whole_s(self) -> tuple[float, float]:
        """Of all layers on all devices: the slowest stage, and the sum."""
        return float(self.slowest_s[-1, -1]), float(self.sum_s[-1, -1])


class Pipeline:
    """Our cost, by paths through a step that no schedule can shorten. Columns: the round trip of one micro-batch; the
    pipeline; the step, with all-reduce and optimizer.

    With stage times x = f + b of the slowest replica, k stages from a stage to the end and B micro-batches, a stage
    takes at least, while R is the shortest round trip from it to the end and back:
    - B x: all that it computes;
    - R + (B - 1) x - (min(k, B) - 1) f, and with b for f: a round trip of the first or the last micro-batch and what
      1F1B puts after or before it (GPipe: R + (B - 1) x);
    - 2 R + (B - k - 1) x for B > k: both;
    - a round trip for every k micro-batches, since only k are in flight;
    - all micro-batches over the links that leave it.
    Optimistic: a bound for every plan, of the fastest replica where a path may go through any, and links that carry
    nothing else. Otherwise an estimate, of the slowest, with the time of whole transfers, which finds good
    plans but proves nothing; it has a fourth column, the first stage's time, since two stages that wait for each
    other's transfers take a micro-batch each in the time of both.
    """

    def __init__(
        self,
        options: Options,
        network: Network,
        prefixes: Prefixes,
        sample_bytes: Sequence[int],
        microbatches: int,
        samples: int,
        schedule: str,
        shard_parameters: bool,
        optimistic: bool,
    ) -> None:
        self._o, self._t, self._n, self._prefixes = options, options.kinds.tables, network, prefixes
        self._bytes = np.array([0, *sample_bytes], dtype=float)  # by the layer that a cut is before
        self._batches, self._samples, self._gpipe = microbatches, samples, schedule == "gpipe"
        self._sharded, self._optimistic = shard_parameters, optimistic
        self.columns = 3 if optimistic else 4
        self._ring_s_per_byte = network.ring_s_per_byte[options.index]
        self._ring_s = network.ring_s[options.index]
        self._first_node, self._last_node = network.first_node[options.index], network.last_node[options.index]
        self._inside, self._aligned = network.inside[options.index], network.aligned[options.index]
        self._widest = network.widest[options.index]

    def possible(self, option: Ints, begin: Ints, end: Ints, stages: int, best_s: float) -> Masks:
        kind = self._o.kind[option]
        flights = self._batches if self._gpipe else min(stages, self._batches)
        fits = self._t.flights[kind, begin, end] >= flights
        return np.asarray(fits & (self._batches * self._t.slowest_s[kind, begin, end] < best_s))

    def extended(self, rows: Floats, option: Ints, begin: Ints, end: Ints, stages: int, after: Ints) -> Floats:
        t, batches = self._t, self._batches
        at = (self._o.kind[option], begin, end)
        x, xf = t.slowest_s[at], t.slowest_forward_s[at]
        f, b = (
            (t.least_forward_s[at], t.least_backward_s[at])
            if self._optimistic
            else (t.most_forward_s[at], t.most_backward_s[at])
        )
        shard = t.shard_bytes[at]
        ring = self._ring_s_per_byte[option] * shard + self._ring_s[option]
        end_s = t.optimizer_s[at]
        if self._sharded:  # a gather with each forward; a gather and a scatter with each backward
            x, xf, f, b = x + 3 * ring, xf + ring, f + ring, b + 2 * ring
        else:
            end_s = end_s + 2 * ring
        if (after < 0).all():
            trip, busy = f + b, np.zeros(len(f))
            way, forward = trip, f
            least = np.zeros((self.columns, len(f)))
        else:
            one, every = self._boundary(option, after, self._bytes[end])
            way = f + b + 2 * one
            forward = f + one
            trip = way + rows[0]
            busy = f + b + batches * every + one + rows[0]
            least = rows
        flying = batches if self._gpipe else min(stages, batches)
        spared = 0.0 if self._gpipe else (flying - 1) * np.minimum(xf, x - xf)
        pipeline = np.maximum(batches * x, trip + (batches - 1) * x - spared)
        pipeline = np.maximum(pipeline, busy)
        pipeline = np.maximum(pipeline, way + least[1])
        if not self._gpipe:
            if batches > stages:
                period = x if self._optimistic else np.maximum(x, (way + least[3]) / 2)
                pipeline = np.maximum(pipeline, 2 * trip + (batches - stages - 1) * period)
            rounds, rest = divmod(batches - 1, stages)
            pipeline = np.maximum(pipeline, trip * (rounds + 1) + rest * b)
        step = np.maximum(pipeline + end_s, forward + least[2])
        return np.stack([trip, pipeline, step] if self._optimistic else [trip, pipeline, step, f + b])

    def total_s(self, rows: Floats) -> Floats:
        return rows[2]

    def key(self, option: Ints) -> Ints:
        return np.zeros(len(option), dtype=np.int64)

    def bound_s(self, rows: Floats, begin: Ints, first: Ints) -> Floats:
        slowest, total = self._prefixes.slowest_s[first, begin], self._prefixes.sum_s[first, begin]
        bound = np.maximum(self._batches * slowest, rows[2] + self._prefixes.forward_s[first, begin])
        # A stage in front whose forward is at most half of its time (or its backward) spares at most half.
        halves = 1.0 if self._gpipe else 0.5
        with np.errstate(invalid="ignore"):  # 0 * inf, for one micro-batch
            trip = rows[0] + total + (self._batches - 1) * halves * slowest
        return np.where(begin > 0, np.maximum(np.maximum(bound, trip), rows[1] + total), rows[2])

    def _boundary(self, left: Ints, right: Ints, sample_bytes: Floats) -> tuple[Floats, Floats]:
        """Seconds of one transfer's way, and for which one micro-batch keeps the busiest link."""
        if self._optimistic:
            width = np.where(self._aligned[left], self._widest[left], np.inf)
            least = np.where(np.isinf(width), 0.0, sample_bytes / width)  # one sample, from the best connected node
            leaves = np.where(
                self._aligned[left] & self._inside[left], self._samples / self._n.leaving[self._last_node[left]], 0.0
            )
            return least, sample_bytes * leaves
        node, target = self._last_node[left], self._first_node[right]
        near = (node == target) & self._inside[left] & self._inside[right]
        most = np.maximum(self._o.most[left], self._o.most[right])
        width = np.minimum(self._n.leaving[node], self._n.entering[target])
        # Replicas that share a link fall out of step until their transfers follow each other: each waits for its own.
        # What one node of a wider group sends is its part of the samples.
        parts = np.where(self._inside[left] | self._inside[right], self._samples, most)
        with np.errstate(divide="ignore"):
            own = np.where(near, most / self._n.fabric[node], most / width)
            busy = np.where(near, most / self._n.fabric[node], parts / width)
        return sample_bytes * own, sample_bytes * busy
