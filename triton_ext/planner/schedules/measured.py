"""Measured points in place of the model, between the smallest and the largest of them only."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from typing import NamedTuple

from ...errors import PlanningError
from .request import Measurement, Request

MEASURED = "measured"  # how a basis begins that is not the model


class Interpolated(NamedTuple):
    """standalone_s at the bytes asked for (None: outside the range, or nothing was measured), and on what it rests."""

    standalone_s: float | None
    basis: str


def interpolate(measured: Iterable[Measurement], request: Request, schedule: str, slices: int) -> Interpolated:
    """Between the two points around the request's bytes, linear in the logarithms of bytes and seconds.

    Points of other collectives, schedules, numbers of ranks or slices do not count, and of the same bytes one for these
    slices counts before one for any. Raises PlanningError for a point that is not positive, and for two that differ of
    the same bytes and slices.
    """
    general: dict[int, float] = {}
    own: dict[int, float] = {}
    for point in measured:
        if (point.collective, point.schedule, point.world) != (request.collective, schedule, request.world):
            continue
        if point.slices not in (None, slices):
            continue
        if not (point.tensor_bytes > 0 and math.isfinite(point.standalone_s) and point.standalone_s > 0):
            raise PlanningError(f"{point}: give positive bytes and seconds")
        known = general if point.slices is None else own
        if known.setdefault(point.tensor_bytes, point.standalone_s) != point.standalone_s:
            raise PlanningError(f"{point}: measured before as {known[point.tensor_bytes]} s; give one of the two")
    points = general | own
    if not points:
        return Interpolated(None, "model")
    sizes, asked = sorted(points), request.tensor_bytes
    span = f"{len(sizes)} measured, {sizes[0]} to {sizes[-1]} B"
    if not sizes[0] <= asked <= sizes[-1]:
        return Interpolated(None, f"model ({span}: outside)")
    right = bisect_left(sizes, asked)
    if sizes[right] == asked:
        return Interpolated(points[asked], f"{MEASURED} ({span})")
    low, high = sizes[right - 1], sizes[right]
    part = math.log(asked / low) / math.log(high / low)
    seconds = math.exp((1 - part) * math.log(points[low]) + part * math.log(points[high]))
    return Interpolated(seconds, f"{MEASURED} ({span})")
