"""Points that nobody measured, from a roofline: a layer takes as long as its arithmetic or its memory traffic does,
whichever is longer.

Where the model has measured points, on this or another device type, the roofline only scales them: by the ratio of its
two predictions. So kernels' efficiency, communication inside tensor parallelism and everything else the roofline leaves
out is taken over from the measured point; one of the same degree is preferred. Without any measured point,
`UNMEASURED_EFFICIENCY` of the roofline is assumed, at the peak that the device type gives: for 16-bit numbers in the
presets, which float32 training without matrix units misses by far. Every point made here has the source "modelled".

Work of a layer for one sample, forward and backward, with P parameters, s tokens and h hidden features:
6 P s floating-point operations for products with parameters and 12 s^2 h for attention (Narayanan et al., SC 2021,
without recomputation), and memory traffic of three passes over the parameters and over what the layer stores.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ...errors import PlanningError
from ..cluster import DeviceType
from .profiles import BYTES_PER_PARAMETER, Gap, Key, Model, Point, Profiles

UNMEASURED_EFFICIENCY = 0.4  # of the roofline; 30 to 52 % of peak in Narayanan et al., table 1
_PASSES = 3  # forward, and backward for inputs and for parameters
_ADAM_BYTES_PER_PARAMETER = 28  # reads parameter, gradient and two moments, writes all but the gradient, float32
_STATE_COPIES = 4  # parameters, gradients, two moments
# What a block stores for its backward pass, in bytes for each token and feature: 10 not split by the tensor-parallel
# degree and 24 split, plus attention's 5 s / (features of a head), split (Korthikanti et al., MLSys 2023, 16-bit).
_STORED_WHOLE, _STORED_SPLIT, _HEAD_FEATURES = 10, 24, 128


@dataclass(frozen=True)
class Work:
    """By layer, for one sample, forward and backward, unsharded: floating-point operations and stored bytes."""

    flop: tuple[float, ...]
    stored_bytes: tuple[float, ...]


def transformer_work(model: Model, hidden_size: int | None = None) -> Work:
    """Of a transformer [embedding, block, …, head].

    hidden_size: features; by default what a block of 12 h^2 parameters has, the first one that has any. Raises
    PlanningError where that says nothing.
    """
    if model.layers < 3:
        raise PlanningError(
            f"model {model.name} has {model.layers} layers; a transformer has embedding, blocks and head"
        )
    parameters = [size / BYTES_PER_PARAMETER for size in model.parameter_bytes]
    hidden = hidden_size or math.sqrt(next((count for count in parameters[1:-1] if count), 0.0) / 12)
    if not hidden:
        raise PlanningError(
            f"model {model.name}: no layer between its first and its last has parameters, so that nothing can be "
            "modelled; measure what is missing"
        )
    flop, stored = [0.0], [model.activation_bytes[0] * 1.0]  # an embedding only looks up
    for layer in range(1, model.layers - 1):
        values = model.activation_bytes[layer] / BYTES_PER_PARAMETER
        tokens = values / hidden
        flop.append(6 * parameters[layer] * tokens + 12 * tokens**2 * hidden)
        attention = 5 * tokens / _HEAD_FEATURES
        # 16-bit figures for the 4-byte activations of the profiles: twice.
        stored.append(2 * values * (_STORED_WHOLE + _STORED_SPLIT + attention))
    values = model.activation_bytes[-1] / BYTES_PER_PARAMETER
    tokens = model.activation_bytes[-2] / BYTES_PER_PARAMETER / hidden
    logits = values > tokens * hidden  # a head that shares the embedding's parameters has none of its own
    flop.append(6 * max(parameters[-1] * tokens, hidden * values if logits else 0.0))
    stored.append(2.0 * model.activation_bytes[-1])
    return Work(tuple(flop), tuple(stored))


def modelled(
    profiles: Profiles,
    device_types: Mapping[str, DeviceType],
    key: Key,
    work: Work | None = None,
) -> Point | Gap:
    """One point for a device type, scaled from the nearest one that is not modelled itself.

    device_types: by name, figures of the wanted type and of those whose points may be scaled.
    work: by default that of a transformer.
    """
    name, tp, samples = key
    if name not in device_types:
        return Gap(
            key, "type", f"no figures of device type {name}; there are {', '.join(sorted(device_types)) or 'none'}"
        )
    work = work or transformer_work(profiles.model)
    target = device_types[name]
    base_key = _nearest(profiles, device_types, key)
    if base_key is None:
        return _absolute(profiles.model, target, work, tp, samples)
    base, other = profiles.points[base_key], device_types[base_key[0]]
    shards = _shards(profiles, key, base_key)
    base_shards = profiles.shard_bytes(base_key)
    predicted = _layer_s(target, work, shards, tp, samples)
    known = _layer_s(other, work, base_shards, base_key[1], base_key[2])
    ratios = [a / b if b else 1.0 for a, b in zip(predicted, known, strict=True)]
    layer_ms = tuple(time * ratio for time, ratio in zip(base.layer_ms, ratios, strict=True))
    whole = sum(layer_ms) / sum(base.layer_ms) if sum(base.layer_ms) else 1.0
    beyond = max(0.0, base.forward_backward_ms - sum(base.layer_ms)) * whole
    optimizer = (sum(shards) / sum(base_shards) if sum(base_shards) else 1.0) * (
        other.memory_bandwidth_bytes_per_s / target.memory_bandwidth_bytes_per_s
    )
    activations = tuple(
        round(size * samples / base_key[2] * _stored_share(tp) / _stored_share(base_key[1]))
        for size in base.activation_memory_bytes
    )
    fixed = [
        size - activation
        for size, activation in zip(
            base.memory_bytes, base.activation_memory_bytes or (0,) * len(base.memory_bytes), strict=True
        )
    ]
    memory = tuple(
        math.ceil(size * (shard / before if before else 1.0)) + activation
        for size, shard, before, activation in zip(
            fixed, shards, base_shards, activations or (0,) * len(fixed), strict=True
        )
    )
    return Point(
        layer_ms=layer_ms,
        memory_bytes=memory,
        forward_backward_ms=sum(layer_ms) + beyond,
        optimizer_ms=base.optimizer_ms * optimizer,
        batch_generator_ms=base.batch_generator_ms * samples / base_key[2],
        forward_share=base.forward_share,
        activation_memory_bytes=activations,
        parameter_bytes=shards,
        source="modelled",
    )


def add_modelled(
    profiles: Profiles, device_types: Mapping[str, DeviceType], wanted: Iterable[Key], work: Work | None = None
) -> Profiles:
    """The profiles with those of the wanted points that they lack. PlanningError for a type without figures."""
    points = dict(profiles.points)
    for key in sorted(set(wanted)):
        if key not in points:
            point = modelled(profiles, device_types, key, work)
            if isinstance(point, Gap):
                raise PlanningError(point.reason)
            points[key] = point
    return Profiles(profiles.model, points)


def _nearest(profiles: Profiles, device_types: Mapping[str, DeviceType], key: Key) -> Key | None:
    """The same degree before another one, the same type before another one, then the nearest micro-batch."""
    name, tp, samples = key

    def distance(other: Key) -> tuple[float, bool, float, Key]:
        return (abs(math.log(other[1] / tp)), other[0] != name, abs(math.log(other[2] / samples)), other)

    usable = [k for k, point in profiles.points.items() if k[0] in device_types and point.source != "modelled"]
    return min(usable, key=distance, default=None)


def _shards(profiles: Profiles, key: Key, base_key: Key) -> tuple[int, ...]:
    if key[1] == base_key[1]:
        return profiles.shard_bytes(base_key)
    return tuple(-(-size // key[1]) for size in profiles.model.parameter_bytes)


def _stored_share(tp: int) -> float:
    return (_STORED_WHOLE + _STORED_SPLIT / tp) / (_STORED_WHOLE + _STORED_SPLIT)


def _layer_s(device: DeviceType, work: Work, shards: tuple[int, ...], tp: int, samples: int) -> list[float]:
    times = []
    for flop, stored, shard in zip(work.flop, work.stored_bytes, shards, strict=True):
        traffic = _PASSES * (shard + stored * samples * _stored_share(tp))
        compute = flop * samples / tp / device.peak_flop_per_s
        times.append(max(compute, traffic / device.memory_bandwidth_bytes_per_s))
    return times


def _absolute(model: Model, device: DeviceType, work: Work, tp: int, samples: int) -> Point:
    shards = tuple(-(-size // tp) for size in model.parameter_bytes)
    layer_ms = tuple(1e3 * time / UNMEASURED_EFFICIENCY for time in _layer_s(device, work, shards, tp, samples))
    parameters = sum(shards) / BYTES_PER_PARAMETER
    update_s = parameters * _ADAM_BYTES_PER_PARAMETER / device.memory_bandwidth_bytes_per_s
    activations = tuple(math.ceil(size * samples * _stored_share(tp)) for size in work.stored_bytes)
    return Point(
        layer_ms=layer_ms,
        memory_bytes=tuple(_STATE_COPIES * shard + a for shard, a in zip(shards, activations, strict=True)),
        forward_backward_ms=sum(layer_ms),
        optimizer_ms=1e3 * update_s / UNMEASURED_EFFICIENCY,
        activation_memory_bytes=activations,
        parameter_bytes=shards,
        source="modelled",
    )
