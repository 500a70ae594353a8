"""Metis's layer balance (USENIX ATC 2024), for many plans at once.

Arrays have the stages first, the plans last. Stage capacities sum to 1 for each plan, as do the layers' costs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

PARTS = 7  # sub-layers of a layer
ATTEMPTS = 3
_MOVES = 3
_MEMORY_MARGIN = 0.9

# Memory needed over memory there is, of stages x plans: from the edges (stages + 1 x plans) of the plans in `which`.
MemoryRatio = Callable[[Ints, Ints], Floats]


@dataclass(frozen=True)
class Balanced:
    """edges: where each stage begins, and the end. attempts: 0 where no attempt fits the memory. ratio: memory needed
    over memory there is, in the last attempt."""

    edges: Ints
    attempts: Ints
    ratio: Floats


def balance(layer_cost: Floats, capacity: Floats, memory_ratio: MemoryRatio) -> Balanced:
    """Contiguous layers for each stage, at least one, in proportion to capacity, within memory.

    Where memory does not suffice, capacity moves from the stages that lack it to those with room, and the split is
    made again, up to 3 attempts.
    """
    stages, plans = capacity.shape
    if not layer_cost.any():  # layers that take no time are equal
        layer_cost = np.ones_like(layer_cost)
    parts = np.concatenate(([0.0], np.cumsum(np.repeat(layer_cost / layer_cost.sum() / PARTS, PARTS))))
    parts[-1] = 1.0
    edges = np.empty((stages + 1, plans), np.int64)
    attempts = np.zeros(plans, np.int64)
    ratio = np.empty((stages, plans))
    which = np.arange(plans)
    for attempt in range(1, ATTEMPTS + 1):
        tried = split(parts, capacity)
        found = memory_ratio(tried, which)
        edges[:, which], ratio[:, which] = tried, found
        fits = (found <= 1).all(axis=0)
        attempts[which[fits]] = attempt
        if attempt == ATTEMPTS or fits.all():
            break
        capacity, possible = _shifted(capacity[:, ~fits], found[:, ~fits])
        which, capacity = which[~fits][possible], capacity[:, possible]
        if not which.size:
            break
    return Balanced(edges, attempts, ratio)


def split(parts: Floats, capacity: Floats) -> Ints:
    """Layers by compute alone. parts: prefix sums of the sub-layers' costs.

    Every stage but the last takes sub-layers from the front while its capacity exceeds the next one, which is then set
    aside; the last takes from the end, a whole layer at least. What is left goes, in order, to the neighbouring stage
    with more capacity left. A layer belongs to the stage of its middle sub-layer (of the majority, where there is one).
    At most three times, the stage with most capacity left takes a layer from its more loaded neighbour, unless the
    most loaded stage would get worse.
    """
    stages, plans = capacity.shape
    layers = (len(parts) - 1) // PARTS
    edges = np.zeros((stages + 1, plans), np.int64)
    edges[stages] = layers
    if stages == 1:
        return edges
    last = PARTS * (layers - 1)
    load = np.empty((stages, plans))
    ends = np.empty((stages - 1, plans), np.int64)
    position = np.zeros(plans, np.int64)
    for stage in range(stages - 1):
        end = np.searchsorted(parts, parts[position] + capacity[stage], "left") - 1
        end = np.minimum(np.maximum(end, position), last)
        load[stage] = parts[end] - parts[position]
        ends[stage] = end
        position = np.minimum(end + 1, last)
    begin = np.searchsorted(parts, 1 - capacity[-1], "right")
    begin = np.minimum(np.maximum(begin, position), last)
    load[-1] = 1 - parts[begin]
    for stage in range(stages - 2):
        end = ends[stage]
        after = np.minimum(end + 1, last)
        size = parts[after] - parts[end]
        left = capacity[stage] - load[stage] >= capacity[stage + 1] - load[stage + 1]
        load[stage] += np.where(left, size, 0.0)
        load[stage + 1] += np.where(left, 0.0, size)
        ends[stage] = np.where(left, after, end)
    # Between the last two stages: the left one takes while it has more capacity left, then the right one the rest.
    more = (capacity[-2] - load[-2]) - (capacity[-1] - load[-1])
    end = np.searchsorted(parts, parts[ends[-1]] + more, "right")
    ends[-1] = np.minimum(np.maximum(end, ends[-1]), begin)
    edges[1:-1] = (ends + PARTS // 2) // PARTS
    for stage in range(1, stages):
        np.maximum(edges[stage], edges[stage - 1] + 1, out=edges[stage])
    for stage in range(stages - 1, 0, -1):
        np.minimum(edges[stage], edges[stage + 1] - 1, out=edges[stage])
    _move(parts[::PARTS], capacity, edges)
    return edges


def _move(costs: Floats, capacity: Floats, edges: Ints) -> None:
    stages, plans = capacity.shape
    which = np.arange(plans)
    slack = capacity - np.diff(costs[edges], axis=0)
    for _ in range(_MOVES):
        if not which.size:
            return
        columns = np.arange(which.size)
        taker = slack.argmax(axis=0)
        sizes = np.diff(edges[:, which], axis=0)
        candidates = np.where(sizes > 1, slack, np.inf)
        left = np.where(taker > 0, candidates[taker - 1, columns], np.inf)
        right = np.where(taker < stages - 1, candidates[np.minimum(taker + 1, stages - 1), columns], np.inf)
        from_left = left <= right
        giver = taker + np.where(from_left, -1, 1)
        movable = np.isfinite(np.minimum(left, right))
        giver = np.where(movable, giver, taker)
        # The edge that moves, and the layer that changes hands.
        edge = np.where(from_left, taker, taker + 1)
        before = edges[edge, which]
        layer = np.where(from_left, before - 1, before)
        layer = np.minimum(np.maximum(layer, 0), len(costs) - 2)
        size = np.where(movable, costs[layer + 1] - costs[layer], 0.0)
        moved = slack.copy()
        moved[taker, columns] -= size
        moved[giver, columns] += size
        better = movable & (moved.min(axis=0) >= slack.min(axis=0))
        which, slack = which[better], moved[:, better]
        edges[edge[better], which] += np.where(from_left[better], -1, 1)


def _shifted(capacity: Floats, ratio: Floats) -> tuple[Floats, Bools]:
    """Capacity after moving it to stages with room in their memory; which plans had enough of it."""
    over = ratio > 1
    lowered = np.where(over, capacity * (_MEMORY_MARGIN / np.maximum(ratio, 1.0)), capacity)
    removed = (capacity - lowered).sum(axis=0)
    room = np.where(over, 0.0, capacity / np.maximum(ratio, 1e-12) - capacity)
    possible = room.sum(axis=0) >= removed
    result = lowered
    for _ in range(len(capacity)):  # in proportion to capacity; what exceeds a stage's room goes to the others
        open_capacity = np.where(room > 0, capacity, 0.0)
        total = open_capacity.sum(axis=0)
        given = np.minimum(room, removed * open_capacity / np.where(total > 0, total, 1.0))
        result, room, removed = result + given, room - given, removed - given.sum(axis=0)
        if not (removed > 1e-12).any():
            break
    return result, possible
