"""What a model costs on a device: measured or modelled times and memory of each layer.

A layer list is [embedding, block, …, head]: the units that a pipeline can be cut between.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ...errors import PlanningError

BYTES_PER_PARAMETER = 4  # of Metis's parameter bytes: float32


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
    is the part that each further micro-batch in flight adds (0 where the profile does not say).
    source says where it comes from: "measured", "interpolated" or "modelled".
    """

    layer_ms: tuple[float, ...]
    memory_bytes: tuple[int, ...]
    forward_backward_ms: float
    optimizer_ms: float
    batch_generator_ms: float = 0.0
    forward_share: float = 1 / 3
    activation_memory_bytes: tuple[int, ...] = ()
    source: str = "measured"

    def __post_init__(self) -> None:
        times = (*self.layer_ms, self.forward_backward_ms, self.optimizer_ms, self.batch_generator_ms)
        if not all(math.isfinite(time) and time >= 0 for time in times):
            raise PlanningError("a profile's times must be finite and not negative")


Key = tuple[str, int, int]  # device type, tensor-parallel degree, samples of a micro-batch


@dataclass(frozen=True)
class Profiles:
    """All points of one model."""

    model: Model
    points: Mapping[Key, Point] = field(default_factory=dict)
