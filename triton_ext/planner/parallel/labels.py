"""Partial plans, extended stage by stage: label-setting dynamic programming over layers and devices.

A label is a plan of the last layers on the last devices. Labels of as many stages, with the same layers and devices
left, compete: dominated ones are dropped, and so are those that no completion makes better than the best plan known.
Without the first rule every plan below a cost is found; with a beam, only some good ones.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from .layer_tables import Floats
from .objectives import Objective
from .options import Ints, Options

_PAIRWISE = 400  # labels that are compared all at once


class OutOfTime(Exception):
    """The search was not over when its time was, or had more labels than it may."""


@dataclass(frozen=True)
class Found:
    """A complete plan: its objective, and for each stage an option and layers [begin, end)."""

    total_s: float
    stages: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, eq=False)
class _Labels:
    """Of one number of stages; sorted by first device, descending. parent: into the labels of one stage less."""

    rows: Floats  # (columns, n)
    begin: Ints
    first: Ints
    option: Ints
    parent: Ints

    def take(self, chosen: Ints) -> _Labels:
        return _Labels(
            self.rows[:, chosen], self.begin[chosen], self.first[chosen], self.option[chosen], self.parent[chosen]
        )


@dataclass(frozen=True)
class Limits:
    """best_s: plans must take less. beam: labels kept of a state (0: all that are not dominated). dominance: False
    keeps all. deadline of time.monotonic. labels: at most so many of one number of stages."""

    best_s: float
    max_stages: int
    beam: int = 0
    dominance: bool = True
    deadline_s: float = float("inf")
    labels: int = 2_000_000


def search(
    objective: Objective, options: Options, devices: int, layers: int, limits: Limits, allow_unused: bool = False
) -> list[Found]:
    """Complete plans, best first: the best for each number of stages and, with a beam or without dominance, others.

    Raises OutOfTime.
    """
    empty = np.zeros(0, dtype=np.int64)
    levels = [
        _Labels(
            np.zeros((objective.columns, 1)), np.array([layers]), np.array([devices]), np.array([-1]), np.array([-1])
        )
    ]
    complete: list[tuple[float, int, int]] = []  # objective, number of stages, label
    for stages in range(1, limits.max_stages + 1):
        before = levels[-1]
        if not len(before.begin):
            break
        made = []
        size = 0
        for first in range(devices - 1, -1, -1):
            if time.monotonic() > limits.deadline_s:
                raise OutOfTime
            new = _in_front(objective, options, before, first, stages, limits, allow_unused)
            if new is not None and len(new.begin):
                new = new.take(_kept(objective, new, limits))
                made.append(new)
                size += len(new.begin)
                if size > limits.labels:
                    raise OutOfTime
        if not made:
            break
        level = _Labels(
            np.concatenate([m.rows for m in made], axis=1),
            *(np.concatenate([getattr(m, name) for m in made]) for name in ("begin", "first", "option", "parent")),
        )
        done = np.flatnonzero(level.begin == 0)
        totals = objective.total_s(level.rows[:, done])
        complete += [(float(total), stages, int(label)) for total, label in zip(totals, done, strict=True)]
        levels.append(level)
    found = []
    for total, stages, label in sorted(complete):
        chain, end = [], 0
        for number in range(stages, 0, -1):
            level = levels[number]
            parent = int(level.parent[label])
            end = int(levels[number - 1].begin[parent])
            chain.append((int(level.option[label]), int(level.begin[label]), end))
            label = parent
        found.append(Found(total, tuple(chain)))
    return found if len(complete) else list(empty)


def _in_front(
    objective: Objective,
    options: Options,
    before: _Labels,
    first: int,
    stages: int,
    limits: Limits,
    allow_unused: bool,
) -> _Labels | None:
    """Labels with one more stage, which begins at a device."""
    starting = np.flatnonzero(options.first == first)
    if not len(starting):
        return None
    # Labels are sorted by first device, descending: those from a device on are the first ones.
    until = np.searchsorted(-before.first, -options.last[starting], side="right")
    since = (
        np.zeros_like(until) if allow_unused else np.searchsorted(-before.first, -options.last[starting], side="left")
    )
    counts = until - since
    total = int(counts.sum())
    if not total:
        return None
    option = np.repeat(starting, counts)
    label = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(since, counts)
    ends = before.begin[label]
    keep = ends > 0
    option, label, ends = option[keep], label[keep], ends[keep]
    begins = np.arange(1 if first and not allow_unused else 0, 1 if not first else int(ends.max(initial=0)))
    if not len(begins) or not len(ends):
        return None
    shape = (len(option), len(begins))
    begin = np.broadcast_to(begins, shape)
    mask = begin < ends[:, None]
    pair, column = np.nonzero(mask)
    option, label, end, begin = option[pair], label[pair], ends[pair], begins[column]
    possible = objective.possible(option, begin, end, stages, limits.best_s)
    option, label, end, begin = option[possible], label[possible], end[possible], begin[possible]
    if not len(option):
        return None
    rows = objective.extended(before.rows[:, label], option, begin, end, stages, before.option[label])
    at = np.full(len(begin), first)
    good = np.flatnonzero(objective.bound_s(rows, begin, at) < limits.best_s)
    return _Labels(rows[:, good], begin[good], at[good], option[good], label[good])


def _kept(objective: Objective, labels: _Labels, limits: Limits) -> Ints:
    """Which labels of one first device stay: by layers left and key, those that are not dominated, or the best few."""
    if not limits.dominance:
        return np.arange(len(labels.begin))
    total = objective.total_s(labels.rows)
    key = objective.key(labels.option) if not limits.beam else np.zeros(len(total), dtype=np.int64)
    order = np.lexsort((*labels.rows[::-1], total, key, labels.begin))
    begin, key = labels.begin[order], key[order]
    edges = np.flatnonzero(np.concatenate(([True], (begin[1:] != begin[:-1]) | (key[1:] != key[:-1]))))
    sizes = np.diff([*edges, len(order)])
    if limits.beam:
        return np.asarray(order[np.arange(len(order)) - np.repeat(edges, sizes) < limits.beam])
    parts = [order[a : a + size] for a, size in zip(edges, sizes, strict=True)]
    return np.concatenate([part[_best(labels.rows[:, part])] for part in parts])


def _best(rows: Floats) -> Ints:
    """Of (columns, n) rows, sorted so that none is dominated by a later one: those that no earlier one dominates."""
    chosen = np.zeros(0, dtype=np.int64)
    for start in range(0, rows.shape[1], _PAIRWISE):
        fresh = np.arange(start, min(start + _PAIRWISE, rows.shape[1]))
        if len(chosen):
            fresh = fresh[~(rows[:, chosen, None] <= rows[:, None, fresh]).all(axis=0).any(axis=0)]
        below = (rows[:, fresh, None] <= rows[:, None, fresh]).all(axis=0)
        fresh = fresh[~np.triu(below, 1).any(axis=0)]
        chosen = np.concatenate((chosen, fresh))
    return chosen
