"""Rates of flows: max-min fair within a priority level, strict between levels."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def fair_rates(
    links: NDArray[np.int64], levels: NDArray[np.int64], capacities_bytes_per_second: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Bytes per second of each flow.

    links: (flows, longest path), padded with len(capacities_bytes_per_second). levels: (flows,), lower goes first.
    """
    left = np.append(capacities_bytes_per_second, np.inf)
    nothing = 1e-9 * left[:-1]  # what rounding leaves of a full link
    rates = np.zeros(len(links))
    for level in np.unique(levels):
        chosen = np.flatnonzero(levels == level)
        rates[chosen], used = _fill(links[chosen], left)
        left -= used
        left[:-1][left[:-1] < nothing] = 0.0
    return rates


def _fill(links: NDArray[np.int64], left: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Progressive filling: in each round, all links that are the tightest for every flow on them are filled at once."""
    size, hops = len(left), links.shape[1]
    rates, used = np.zeros(len(links)), np.zeros(size)
    todo = np.arange(len(links))
    while len(todo):
        on = links[todo]
        counts = np.bincount(on.ravel(), minlength=size)
        share = np.maximum(left - used, 0.0) / np.maximum(counts, 1)
        tightest = share[on].min(axis=1)
        least = np.full(size, np.inf)
        np.minimum.at(least, on.ravel(), np.repeat(tightest, hops))
        full = share <= least * (1 + 1e-12)
        full[-1] = False
        frozen = full[on].any(axis=1)
        rate = tightest[frozen]
        rates[todo[frozen]] = rate
        used += np.bincount(on[frozen].ravel(), weights=np.repeat(rate, hops), minlength=size)
        used[-1] = 0.0
        todo = todo[~frozen]
    return rates, used
