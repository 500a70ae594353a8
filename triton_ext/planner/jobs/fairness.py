"""Rates of streams: max-min fair within a priority level, strict between levels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Usage:
    """Who uses which link: entry i says that each byte of stream streams[i] is weights[i] bytes on link links[i].

    Entries are sorted by stream, and every stream has one at least.
    """

    streams: NDArray[np.int64]
    links: NDArray[np.int64]
    weights: NDArray[np.float64]

    def of(self, chosen: NDArray[np.bool_]) -> Usage:
        """The entries of the chosen streams."""
        kept = chosen[self.streams]
        return Usage(self.streams[kept], self.links[kept], self.weights[kept])


def fair_rates(
    usage: Usage, levels: NDArray[np.int64], bandwidths_bytes_per_s: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Bytes per second of each stream (as many as levels; 0 without an entry); lower levels go first."""
    left = bandwidths_bytes_per_s.copy()
    nothing = 1e-9 * left  # what rounding leaves of a full link
    rates = np.zeros(len(levels))
    entry_levels = levels[usage.streams]
    for level in np.unique(entry_levels):
        kept = entry_levels == level
        _fill(Usage(usage.streams[kept], usage.links[kept], usage.weights[kept]), left, rates)
        left[left < nothing] = 0.0
    return rates


def _fill(todo: Usage, left: NDArray[np.float64], rates: NDArray[np.float64]) -> None:
    """Progressive filling: in each round, all links that are the tightest for every stream on them are filled at once.

    Takes what is used from `left` (by link), and writes `rates`.
    """
    while len(todo.streams):
        starts = np.flatnonzero(np.diff(todo.streams, prepend=-1))
        counts = np.diff(starts, append=len(todo.streams))
        demand = np.bincount(todo.links, todo.weights, len(left))
        share = left[todo.links] / demand[todo.links]
        tightest = np.minimum.reduceat(share, starts)
        least = np.full(len(left), np.inf)
        np.minimum.at(least, todo.links, np.repeat(tightest, counts))
        full = share <= least[todo.links] * (1 + 1e-12)
        frozen = np.logical_or.reduceat(full, starts)
        rates[todo.streams[starts[frozen]]] = tightest[frozen]
        done = np.repeat(frozen, counts)
        used = todo.weights[done] * rates[todo.streams[done]]
        left -= np.bincount(todo.links[done], used, len(left))
        np.maximum(left, 0.0, out=left)
        todo = Usage(todo.streams[~done], todo.links[~done], todo.weights[~done])
