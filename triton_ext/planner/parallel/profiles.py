"""What a model costs on a device: measured or modelled times and memory of each layer.

A layer list is [embedding, block, …, head]: the units that a pipeline can be cut between.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from ...errors import PlanningError

BYTES_PER_PARAMETER = 4  # of Metis's parameter bytes: float32
SOURCES = ("measured", "interpolated", "modelled")


@dataclass(frozen=True)
class Model:
    """What does not depend on a device: layer by layer, unsharded (tp 1).

    parameter_bytes: float32 parameters. activation_bytes: what a layer hands to the next for one sample, forward;
    the gradient on the way back is as large.
    """

    name: str
    parameter_bytes: tuple[int, ...]
    activation_bytes: tuple[int, ...]

    @property
    def layers(self) -> int:
        return len(self.parameter_bytes)

    def __post_init__(self) -> None:
        if not self.layers or len(self.activation_bytes) != self.layers:
            raise PlanningError(
                f"model {self.name}: {self.layers} layers with parameters, {len(self.activation_bytes)} with "
                "activations; give one number for each layer"
            )


@dataclass(frozen=True)
class Point:
    """One (device type, tensor-parallel degree, micro-batch size): times in ms, memory in bytes, of one device.

    layer_ms is forward and backward together, forward_share the forward's part of it. memory_bytes is what a layer
    needs for its parameters, gradients, optimizer state and the activations of one micro-batch; activation_memory_bytes
    is the part that each further micro-batch in flight adds (empty where the profile does not say). parameter_bytes is
    the device's float32 shard of each layer (empty: the model's divided by the degree).
    source says where it comes from: "measured", "interpolated" or "modelled".
    """

    layer_ms: tuple[float, ...]
    memory_bytes: tuple[int, ...]
    forward_backward_ms: float
    optimizer_ms: float
    batch_generator_ms: float = 0.0
    forward_share: float = 1 / 3
    activation_memory_bytes: tuple[int, ...] = ()
    parameter_bytes: tuple[int, ...] = ()
    source: str = "measured"

    def __post_init__(self) -> None:
        times = (*self.layer_ms, self.forward_backward_ms, self.optimizer_ms, self.batch_generator_ms)
        if not all(math.isfinite(time) and time >= 0 for time in times):
            raise PlanningError("a profile's times must be finite and not negative")
        if self.source not in SOURCES:
            raise PlanningError(f"a profile's source is {self.source!r}; there are {', '.join(SOURCES)}")


Key = tuple[str, int, int]  # device type, tensor-parallel degree, samples of a micro-batch


@dataclass(frozen=True)
class Gap:
    """A point that is not there, why (`code` for counting, `reason` for people), and what there is instead."""

    key: Key
    code: str  # "type", "tp" or "microbatch": the part of the key for which there are no points
    reason: str


@dataclass(frozen=True)
class Profiles:
    """All points of one model. Raises PlanningError for a point whose lists are not as long as the model's."""

    model: Model
    points: Mapping[Key, Point] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for (device_type, tp, samples), point in self.points.items():
            where = f"the profile of {device_type}, tp {tp}, micro-batch {samples}"
            if tp < 1 or samples < 1:
                raise PlanningError(f"{where}: degree and micro-batch must be at least 1")
            lists = {"layer_ms": point.layer_ms, "memory_bytes": point.memory_bytes}
            optional = {
                "activation_memory_bytes": point.activation_memory_bytes,
                "parameter_bytes": point.parameter_bytes,
            }
            for name, values in (lists | {n: v for n, v in optional.items() if v}).items():
                if len(values) != self.model.layers:
                    raise PlanningError(
                        f"{where}: {name} has {len(values)} entries, the model {self.model.name} {self.model.layers} "
                        "layers; give one number for each layer"
                    )

    @cached_property
    def device_types(self) -> tuple[str, ...]:
        return tuple(sorted({device_type for device_type, _, _ in self.points}))

    @cached_property
    def microbatches(self) -> Mapping[tuple[str, int], tuple[int, ...]]:
        """By device type and degree: the sizes of micro-batches with a point, ascending."""
        found: dict[tuple[str, int], list[int]] = {}
        for device_type, tp, samples in sorted(self.points):
            found.setdefault((device_type, tp), []).append(samples)
        return {key: tuple(sizes) for key, sizes in found.items()}

    def degrees(self, device_type: str) -> tuple[int, ...]:
        """The tensor-parallel degrees with a point, ascending."""
        return tuple(tp for name, tp in self.microbatches if name == device_type)

    def point(self, device_type: str, tp: int, samples: int) -> Point | Gap:
        """The point, or what is missing; `completion.interpolate` finds what lies between points."""
        key = (device_type, tp, samples)
        if key in self.points:
            return self.points[key]
        degrees, sizes = self.degrees(device_type), self.microbatches.get((device_type, tp), ())
        if not degrees:
            known = ", ".join(self.device_types) or "none"
            return Gap(key, "type", f"{self.model.name} has no profile on {device_type}; there are {known}")
        if not sizes:
            return Gap(key, "tp", f"{device_type} has no profile at tp {tp}; there are {_listed(degrees)}")
        return Gap(
            key,
            "microbatch",
            f"{device_type} at tp {tp} has no profile of micro-batch {samples}; there are {_listed(sizes)}",
        )

    def shard_bytes(self, key: Key) -> tuple[int, ...]:
        """The float32 parameters of each layer that one device holds."""
        point = self.points[key]
        return point.parameter_bytes or tuple(-(-size // key[1]) for size in self.model.parameter_bytes)


def _listed(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))
