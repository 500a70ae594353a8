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
    for level in np.flatnonzero(np.bincount(entry_levels)):
        kept = entry_levels == level
        _fill(Usage(usage.streams[kept], usage.links[kept], usage.weights[kept]), left, rates)
        left[left < nothing] = 0.0
    return rates


def _fill(todo: Usage, left: NDArray[np.float64], rates: NDArray[np.float64]) -> None:
    """Progressive filling: in each round, all links that are the tightest for every stream on them are filled at once.

    Takes what is used from `left` (by link), and writes `rates`.
    """
    streams, links, weights = todo.streams, todo.links, todo.weights
    while len(streams):
        first = np.empty(len(streams), dtype=np.bool_)  # of a stream's entries
        first[0] = True
        np.not_equal(streams[1:], streams[:-1], out=first[1:])
        starts, number = first.nonzero()[0], first.cumsum() - 1
        share = left[links] / np.bincount(links, weights, len(left))[links]
        tightest = np.minimum.reduceat(share, starts)
        least = np.full(len(left), np.inf)
        np.minimum.at(least, links, tightest[number])
        full = share <= least[links] * (1 + 1e-12)
        frozen = np.logical_or.reduceat(full, starts)
        rates[streams[starts[frozen]]] = tightest[frozen]
        done = frozen[number]
        left -= np.bincount(links[done], weights[done] * rates[streams[done]], len(left))
        np.maximum(left, 0.0, out=left)
        kept = ~done
        streams, links, weights = streams[kept], links[kept], weights[kept]
