"""What a model has to offer, to be profiled layer by layer and cut into pipeline stages."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..errors import PlanningError
from ..user_code import import_file


@runtime_checkable
class LayeredModel(Protocol):
    """An nn.Module whose layers are a sequence.

    layers: modules that each take one tensor, what the layer before returned, whose first dimension is the samples;
    nothing else may pass between layers, since a pipeline can be cut between any two of them. The first takes the
    input of `batch`, the last one's output goes into `loss`.
    """

    layers: nn.ModuleList

    def batch(self, samples: int, seed: int) -> tuple[Tensor, Tensor]:
        """Input and target, both with `samples` as their first dimension; the same for the same seed."""
        ...

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The sum of the samples' losses: so that parts of a batch add up, however they are split."""
        ...


@runtime_checkable
class ShardableModel(LayeredModel, Protocol):
    """A model whose layers can be shared by the devices of a tensor-parallel group."""

    def shard(self, mesh: DeviceMesh) -> None:
        """Shard every layer over a one-dimensional mesh, in place, so that each still takes and returns whole tensors
        (`torch.distributed.tensor.parallel`). Raises PlanningError for a degree that does not divide the layer."""
        ...


def load(location: str, arguments: Mapping[str, Any]) -> LayeredModel:
    """The model that FILE:FUNCTION or MODULE:FUNCTION returns for these arguments; PlanningError if it is none."""
    place, separator, name = location.rpartition(":")
    if not separator:
        raise PlanningError(f"{location}: write it as FILE:FUNCTION, with a function that returns the model")
    module = _import(place)
    function = getattr(module, name, None)
    if not callable(function):
        raise PlanningError(f"{place} has no function {name!r}")
    _check_arguments(location, function, arguments)
    model = function(**arguments)
    if not isinstance(model, LayeredModel) or not len(model.layers):
        raise PlanningError(
            f"{location} returned a {type(model).__name__} that is no layered model; it needs `layers`, a sequence of "
            "modules, `batch(samples, seed)` and `loss(output, target)`: see docs/training.md"
        )
    return model


def _check_arguments(location: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """PlanningError unless the function takes these arguments."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        return  # of a built-in one, which does not say
    try:
        signature.bind(**arguments)
    except TypeError as error:
        known = signature.parameters
        anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
        unknown = None if anything else next((name for name in arguments if name not in known), None)
        what = str(error) if unknown is None else f"takes no argument {unknown!r}"
        raise PlanningError(f"{location} {what}; it takes {', '.join(known) or 'none'}") from None


def shardable(model: LayeredModel, degree: int) -> ShardableModel:
    """The model, if it can be shared by `degree` devices; PlanningError if it has no `shard`."""
    if not isinstance(model, ShardableModel):
        raise PlanningError(
            f"{type(model).__name__} has no method `shard(mesh)`: a tensor-parallel degree of {degree} needs it"
        )
    return model


def boundaries(model: LayeredModel, samples: int) -> list[Tensor]:
    """The input of every layer, and the output of the last: tensors on the meta device, without data.

    Only samples of at least 1 are computed; call it before the model is sharded.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        value = model.batch(samples, seed=0)[0]
        values = [value]
        for layer in model.layers:
            value = layer(value)
            values.append(value)
    for index, value in enumerate(values):
        if not isinstance(value, Tensor) or value.shape[:1] != (samples,):
            raise PlanningError(
                f"layer {max(index - 1, 0)} of {type(model).__name__} gives {_shape(value)} for {samples} samples; "
                "the first dimension must be the samples"
            )
    return [torch.empty(value.shape, dtype=value.dtype, device="meta") for value in values]


def _shape(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _import(place: str) -> Any:
    path = Path(place)
    if path.suffix != ".py":
        try:
            return importlib.import_module(place)
        except (ImportError, ValueError, TypeError) as error:
            raise PlanningError(f"{place}: neither a Python file nor a module that can be imported: {error}") from None
    if not path.is_file():
        raise PlanningError(f"{place}: there is no such file")
    return import_file(path)
