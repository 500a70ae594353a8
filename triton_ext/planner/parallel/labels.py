"""Partial plans, extended stage by stage: label-setting dynamic programming over layers and devices.

A label is a plan of the last layers on the last devices. Labels of as many stages, with the same layers and devices
left, compete: dominated ones are dropped, and so are those that no completion makes better than the best plan known.
Without the first rule every plan below a cost is found; with a beam, only some good ones.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .layer_tables import Floats
from .objectives import Objective
from .options import Ints, Options

_PAIRWISE = 400  # labels that are compared all at once
_AT_ONCE = 1_000_000  # pairs of a label and a number of layers


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
    labels: int = 300_000


def search(
    objective: Objective, options: Options, devices: int, layers: int, limits: Limits, allow_unused: bool = False
) -> list[Found]:
    """Complete plans, best first: the best for each number of stages and, with a beam or without dominance, others.

    Raises OutOfTime.
    """
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
        made: list[_Labels] = []
        for first in range(devices - 1, -1, -1):
            here = list(_in_front(objective, options, before, first, stages, limits, allow_unused))
            if here:
                together = _joined(here)
                made.append(together.take(_kept(objective, together, limits)))
                if sum(len(labels.begin) for labels in made) > limits.labels:
                    raise OutOfTime
        if not made:
            break
        level = _joined(made)
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
    return found


def _joined(parts: list[_Labels]) -> _Labels:
    names = ("begin", "first", "option", "parent")
    return _Labels(
        np.concatenate([part.rows for part in parts], axis=1),
        *(np.concatenate([getattr(part, name) for part in parts]) for name in names),
    )


def _in_front(
    objective: Objective,
    options: Options,
    before: _Labels,
    first: int,
    stages: int,
    limits: Limits,
    allow_unused: bool,
) -> Iterator[_Labels]:
    """Labels with one more stage, which begins at a device; in parts, for memory's sake."""
    starting = np.flatnonzero(options.first == first)
    # Labels are sorted by first device, descending: those from a device on are the first ones.
    until = np.searchsorted(-before.first, -options.last[starting], side="right")
    since = np.searchsorted(-before.first, -options.last[starting], side="left")
    if allow_unused:
        since = np.zeros_like(until)
    counts = until - since
    option = np.repeat(starting, counts)
    label = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(since, counts)
    open_ones = before.begin[label] > 0
    option, label = option[open_ones], label[open_ones]
    most = int(before.begin[label].max(initial=0))
    begins = np.arange(1 if first and not allow_unused else 0, most if first else 1)
    step = max(1, _AT_ONCE // max(1, len(begins)))
    for start in range(0, len(label), step):
        if time.monotonic() > limits.deadline_s:
            raise OutOfTime
        some = slice(start, start + step)
        found = _extended(objective, before, option[some], label[some], begins, first, stages, limits.best_s)
        if found is not None:
            yield found


def _extended(
    objective: Objective,
    before: _Labels,
    option: Ints,
    label: Ints,
    begins: Ints,
    first: int,
    stages: int,
    best_s: float,
) -> _Labels | None:
    """Options in front of labels, pair by pair, with every number of layers."""
    end = before.begin[label]
    pair, column = np.nonzero(begins < end[:, None])
    option, label, end, begin = option[pair], label[pair], end[pair], begins[column]
    possible = objective.possible(option, begin, end, stages, best_s)
    option, label, end, begin = option[possible], label[possible], end[possible], begin[possible]
    if not len(option):
        return None
    rows = objective.extended(before.rows[:, label], option, begin, end, stages, before.option[label])
    at = np.full(len(begin), first)
    good = np.flatnonzero(objective.bound_s(rows, begin, at) < best_s)
    return _Labels(rows[:, good], begin[good], at[good], option[good], label[good]) if len(good) else None


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
