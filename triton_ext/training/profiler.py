"""Times and memory of a model's layers, measured on the device at hand."""

from __future__ import annotations

import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..errors import PlanningError
from ..planner.parallel.profiles import Point
from .executor import optimizer
from .model import LayeredModel

STATE_COPIES = 4  # of float32 parameters: themselves, gradients, and AdamW's two moments
_LEAST_SAMPLE_S = 0.2  # what is shorter is repeated: twenty periods of a CPU quota
_MOST_REPETITIONS = 1000

Key = tuple[int, int]  # tensor-parallel degree, samples of a micro-batch


@dataclass(frozen=True)
class Measurement:
    """A point, with what a profile file has no field for: forward and backward by layer, and the spread of the whole
    model's time, in ms."""

    point: Point
    forward_ms: tuple[float, ...]
    backward_ms: tuple[float, ...]
    p10_ms: float
    p90_ms: float
    repeats: int


@dataclass
class Outcome:
    """Every key is either measured or infeasible, with the reason."""

    measured: dict[Key, Measurement] = field(default_factory=dict)
    infeasible: dict[Key, str] = field(default_factory=dict)


def measure(
    models: dict[int, LayeredModel],
    samples: Sequence[int],
    *,
    repeats: int,
    device: torch.device,
    throttled: bool = False,
    report: Callable[[str], None] = lambda line: None,
) -> Outcome:
    """Measure every (degree, samples): `models` by degree, each sharded already and on the device.

    One sample is the mean of as many passes as take 0.2 s, after one that is not timed; samples of all points take
    turns, and medians are kept. With `throttled`, under a CPU quota, layers share the time of a pass as they share its
    computing time: within a pass the process stands still at any layer. A point for which memory does not suffice is
    infeasible, and ends nothing.
    """
    outcome = Outcome()
    candidates: dict[Key, _Candidate] = {}
    for degree, size in itertools.product(sorted(models), sorted(samples)):
        known = [c for (other, _), c in candidates.items() if other == degree]
        try:
            if known:
                _check_room(known[-1], size, device)
            candidates[degree, size] = _Candidate(models[degree], size, device, throttled)
        except _MEMORY_ERRORS as error:
            outcome.infeasible[degree, size] = _reason(error)
            _free(device)
    for turn in range(repeats):
        report(f"repeat {turn + 1} of {repeats}: {len(candidates)} points")
        for key, candidate in list(candidates.items()):
            try:
                candidate.sample()
            except _MEMORY_ERRORS as error:  # there was enough before: someone else has taken it
                outcome.infeasible[key] = _reason(error)
                del candidates[key]
                _free(device)
    outcome.measured = {key: candidate.measurement() for key, candidate in candidates.items()}
    return outcome


class _NoRoom(Exception):
    """A point that would need more memory than there is."""


_MEMORY_ERRORS = (torch.OutOfMemoryError, MemoryError, _NoRoom, RuntimeError)


def _reason(error: Exception) -> str:
    """Of a lack of memory; anything else is raised again. The CPU's allocator raises a plain RuntimeError."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    if type(error) is RuntimeError and "allocate memory" not in text:
        raise error
    return f"out of memory: {text}"


def _check_room(smaller: _Candidate, samples: int, device: torch.device) -> None:
    """A CPU's memory is not refused but taken from others, in the end by ending a process: so ask before."""
    if device.type != "cpu":
        return
    needed = sum(smaller.activation_bytes) * samples / smaller.samples
    available = _available_bytes()
    if needed > available:
        raise _NoRoom(f"activations of about {needed / 2**30:.1f} GiB; {available / 2**30:.1f} GiB are available")


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise PlanningError("/proc/meminfo does not say how much memory is available")


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


class _Candidate:
    """One point being measured. Making it is the warm-up."""

    def __init__(self, model: LayeredModel, samples: int, device: torch.device, throttled: bool) -> None:
        self.model, self.samples, self._device, self._throttled = model, samples, device, throttled
        self._parameters = [p for layer in model.layers for p in layer.parameters()]
        self._optimizer = optimizer(self._parameters, learning_rate=1e-6)
        self._inputs, self._targets = (part.to(device) for part in model.batch(samples, seed=0))
        self._layers: list[list[float]] = []  # by sample: forward of each layer, then backward of each, in s
        self._optimizer_s: list[float] = []
        self.activation_bytes = self._activations()
        self._pass(_Clock(device, throttled))
        self._optimizer.step()
        self._passes = self._repetitions(lambda: self._pass(_Clock(device, throttled)))
        self._updates = self._repetitions(self._optimizer.step)

    def sample(self) -> None:
        self._pass(_Clock(self._device, self._throttled))  # brings back what other points' samples drove out of caches
        clock = _Clock(self._device, self._throttled)
        for _ in range(self._passes):
            self._pass(clock)
        spans = clock.spans()
        width = 2 * len(self.model.layers)
        self._layers.append([sum(spans[i::width]) / self._passes for i in range(width)])
        began = time.perf_counter()
        for _ in range(self._updates):
            self._optimizer.step()
        self._synchronize()
        self._optimizer_s.append((time.perf_counter() - began) / self._updates)

    def measurement(self) -> Measurement:
        count = len(self.model.layers)
        medians = [statistics.median(values) * 1e3 for values in zip(*self._layers, strict=True)]
        forward, backward = medians[:count], medians[count:]
        backward.reverse()
        layer_ms = tuple(f + b for f, b in zip(forward, backward, strict=True))
        totals = sorted(sum(sample) * 1e3 for sample in self._layers)
        shards = tuple(sum(map(_local_bytes, layer.parameters())) for layer in self.model.layers)
        point = Point(
            layer_ms=layer_ms,
            memory_bytes=tuple(STATE_COPIES * s + a for s, a in zip(shards, self.activation_bytes, strict=True)),
            forward_backward_ms=sum(layer_ms),
            optimizer_ms=statistics.median(self._optimizer_s) * 1e3,
            forward_share=sum(forward) / sum(layer_ms),
            activation_memory_bytes=self.activation_bytes,
            parameter_bytes=shards,
        )
        tenth = (len(totals) - 1) // 10
        return Measurement(point, tuple(forward), tuple(backward), totals[tenth], totals[-1 - tenth], len(totals))

    def _pass(self, clock: _Clock) -> None:
        """Forward and backward of one micro-batch, layer by layer, with a mark after each.

        Gradients are added to those of the pass before, as those of a batch's micro-batches are. The loss belongs to
        the last layer.
        """
        clock.begin()
        value = self._inputs
        ends: list[tuple[Tensor, Tensor]] = []
        for index, layer in enumerate(self.model.layers):
            begin = value.detach().requires_grad_(value.is_floating_point())
            value = layer(begin)
            if index == len(self.model.layers) - 1:
                value = self.model.loss(value, self._targets)
            ends.append((begin, value))
            clock.mark()
        gradient: Tensor | None = None
        while ends:
            begin, value = ends.pop()
            value.backward(gradient)
            gradient = begin.grad
            del begin, value
            clock.mark()

    def _activations(self) -> tuple[int, ...]:
        """What each layer's forward pass keeps for its backward pass, in bytes."""
        held = {_storage(p.data) for p in self._parameters}
        found: list[int] = []
        value = self._inputs
        for index, layer in enumerate(self.model.layers):
            kept: dict[int, int] = {}

            def keep(tensor: Tensor, kept: dict[int, int] = kept) -> Tensor:
                if _storage(tensor) not in held:
                    kept[_storage(tensor)] = _local(tensor).untyped_storage().nbytes()
                return tensor

            begin = value.detach().requires_grad_(value.is_floating_point())
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                value = layer(begin)
                if index == len(self.model.layers) - 1:
                    value = self.model.loss(value, self._targets)
            found.append(sum(kept.values()))
        return tuple(found)

    def _repetitions(self, action: Callable[[], object]) -> int:
        """How many make a sample; ranks of a group, which have to agree, take the most of them."""
        self._synchronize()
        began = time.perf_counter()
        action()
        self._synchronize()
        count = math.ceil(_LEAST_SAMPLE_S / max(time.perf_counter() - began, 1e-6))
        if dist.is_initialized():
            agreed = torch.tensor(count)
            dist.all_reduce(agreed, dist.ReduceOp.MAX)
            count = int(agreed)
        return min(max(1, count), _MOST_REPETITIONS)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class _Clock:
    """Marks in time, and the spans between them."""

    def __init__(self, device: torch.device, throttled: bool) -> None:
        self._on_device, self._throttled = device.type == "cuda", throttled
        self._times: list[float] = []
        self._events: list[torch.cuda.Event] = []
        self._began = time.perf_counter()

    def begin(self) -> None:
        """The first mark; where there is one, the last one is taken: what lies between passes belongs to the second."""
        if not self._times and not self._events:
            self.mark()

    def mark(self) -> None:
        if self._on_device:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)
        else:
            self._times.append(time.process_time() if self._throttled else time.perf_counter())

    def spans(self) -> list[float]:
        """Seconds between marks."""
        if self._on_device:
            torch.cuda.synchronize()
            return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(self._events)]
        spans = [b - a for a, b in itertools.pairwise(self._times)]
        if not self._throttled:
            return spans
        scale = (time.perf_counter() - self._began) / max(sum(spans), 1e-9)
        return [span * scale for span in spans]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _storage(tensor: Tensor) -> int:
    return _local(tensor).untyped_storage().data_ptr()


def _local_bytes(parameter: Tensor) -> int:
    local = _local(parameter.detach())
    return local.numel() * 4  # float32, as Metis counts, whatever the model computes in
