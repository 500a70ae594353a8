"""Points between measured ones.

Times are interpolated linearly in log(time) over log(micro-batch) and log(degree), since both are close to power laws.
Memory is affine: a constant plus a part for each sample; and, over the degree, a replicated part plus a part / degree.
It is interpolated as such (in the micro-batch, and in 1 / degree), rounded up. Nothing is ever extrapolated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from .profiles import Gap, Key, Point, Profiles


def interpolate(profiles: Profiles, key: Key) -> Point | Gap:
    """One point: the one that is there; one inside the measured range of its device type; or the gap with its reason.

    At a profiled degree: between the nearest smaller and larger micro-batch. Else between the nearest lower and higher
    degree that both reach the micro-batch.
    """
    device_type, tp, samples = key
    if key in profiles.points:
        return profiles.points[key]
    row = _in_row(profiles, key)
    if row is not None:
        return row
    degrees = profiles.degrees(device_type)
    low = next((t for t in reversed(degrees) if t < tp and _reaches(profiles, device_type, t, samples)), None)
    high = next((t for t in degrees if t > tp and _reaches(profiles, device_type, t, samples)), None)
    if low is None or high is None:
        return _gap(profiles, key)
    below, above = _in_row(profiles, (device_type, low, samples)), _in_row(profiles, (device_type, high, samples))
    assert below is not None and above is not None  # _reaches
    parts = tuple(
        profiles.shard_bytes(near) if (near := (device_type, t, samples)) in profiles.points else point.parameter_bytes
        for t, point in ((low, below), (high, above))
    )
    return _between(
        below,
        above,
        time_weight=math.log(tp / low) / math.log(high / low),
        memory_weight=(1 / low - 1 / tp) / (1 / low - 1 / high),
        parameter_bytes=_affine(parts[0], parts[1], (1 / low - 1 / tp) / (1 / low - 1 / high)),
    )


def _reaches(profiles: Profiles, device_type: str, tp: int, samples: int) -> bool:
    sizes = profiles.microbatches[device_type, tp]
    return sizes[0] <= samples <= sizes[-1]


def _in_row(profiles: Profiles, key: Key) -> Point | None:
    """The point at a profiled degree, measured or between two micro-batches; None outside."""
    device_type, tp, samples = key
    if key in profiles.points:
        return profiles.points[key]
    sizes = profiles.microbatches.get((device_type, tp), ())
    low = max((size for size in sizes if size < samples), default=None)
    high = min((size for size in sizes if size > samples), default=None)
    if low is None or high is None:
        return None
    return _between(
        profiles.points[device_type, tp, low],
        profiles.points[device_type, tp, high],
        time_weight=math.log(samples / low) / math.log(high / low),
        memory_weight=(samples - low) / (high - low),
        parameter_bytes=profiles.shard_bytes((device_type, tp, low)),
    )


def _between(
    first: Point, second: Point, time_weight: float, memory_weight: float, parameter_bytes: tuple[int, ...]
) -> Point:
    def time(a: float, b: float) -> float:
        if a <= 0 or b <= 0:  # no logarithm
            return a + (b - a) * time_weight
        return math.exp(math.log(a) + (math.log(b) - math.log(a)) * time_weight)

    layer_ms = tuple(time(a, b) for a, b in zip(first.layer_ms, second.layer_ms, strict=True))
    # What forward and backward take beyond their layers is interpolated by itself: it is never negative by rounding.
    beyond = [max(0.0, point.forward_backward_ms - sum(point.layer_ms)) for point in (first, second)]
    activations = (first.activation_memory_bytes, second.activation_memory_bytes)
    return Point(
        layer_ms=layer_ms,
        memory_bytes=_affine(first.memory_bytes, second.memory_bytes, memory_weight),
        forward_backward_ms=sum(layer_ms) + time(*beyond),
        optimizer_ms=time(first.optimizer_ms, second.optimizer_ms),
        batch_generator_ms=time(first.batch_generator_ms, second.batch_generator_ms),
        forward_share=first.forward_share + (second.forward_share - first.forward_share) * time_weight,
        activation_memory_bytes=_affine(*activations, memory_weight) if all(activations) else (),
        parameter_bytes=parameter_bytes,
        source="modelled" if "modelled" in (first.source, second.source) else "interpolated",
    )


def _affine(first: tuple[int, ...], second: tuple[int, ...], weight: float) -> tuple[int, ...]:
    # Rounded up but for the error of the arithmetic itself.
    return tuple(math.ceil(a + (b - a) * weight - 1e-6) for a, b in zip(first, second, strict=True))


def _gap(profiles: Profiles, key: Key) -> Gap:
    gap = profiles.point(*key)
    assert isinstance(gap, Gap)
    if gap.code == "type":
        return gap
    ranges: Mapping[tuple[str, int], tuple[int, ...]] = profiles.microbatches
    device_type, tp, samples = key
    there = "; ".join(
        f"tp {degree}: micro-batches {ranges[device_type, degree][0]} to {ranges[device_type, degree][-1]}"
        for degree in profiles.degrees(device_type)
    )
    return Gap(
        key,
        gap.code,
        f"{device_type} at tp {tp}, micro-batch {samples} is outside the profiled range ({there}); "
        "profile it or allow modelled points",
    )
