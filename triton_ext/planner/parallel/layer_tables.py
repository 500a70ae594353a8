"""What any run of layers costs one device, as tables that the cost model, the simulator and the search share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...errors import PlanningError
from .completion import interpolate
from .plan import Settings
from .profiles import Gap, Key, Point, Profiles

Floats = NDArray[np.float64]

# Adam in float32 keeps, for each byte of parameters, one of gradients and two of moments (ZeRO, Rajbhandari et al.,
# SC 2020, with equal precision throughout).
_MOMENTS, _STATES = 2, 4
# Of a transformer layer's activations, 10 bytes per element are replicated under tensor parallelism (the inputs of the
# norms, dropouts' masks and residuals), of 2 bytes that the layer hands on: 5 times its output. Sequence parallelism
# splits them (Korthikanti et al., MLSys 2023, section 4).
_REPLICATED_OUTPUTS = 5


@dataclass(frozen=True, eq=False)
class Table:
    """Layers [begin, end) on one device of a type, by [begin, end]: (L + 1, L + 1) each; meaningful for begin < end.

    backward_s includes a forward where activations are recomputed. fixed_bytes: memory that does not grow with the
    micro-batches in flight; flight_bytes: what each of them adds. shard_bytes: the device's gradients.
    """

    forward_s: Floats
    backward_s: Floats
    optimizer_s: Floats
    fixed_bytes: Floats
    flight_bytes: Floats
    shard_bytes: Floats
    source: str

    @property
    def total_s(self) -> Floats:
        return self.forward_s + self.backward_s


class LayerTables:
    """Tables of one model under one setting, made when first asked for."""

    def __init__(self, profiles: Profiles, settings: Settings) -> None:
        self.profiles = profiles
        self.settings = settings
        self._tables: dict[tuple[Key, int], Table | Gap] = {}

    def find(self, key: Key, dp: int) -> Table | Gap:
        """The table of a device type, degree and number of samples, in a stage of dp replicas; Gap where the profiles
        neither have the point nor points around it. A replica without samples keeps the state of one with one sample.
        """
        sharded = self.settings.shard_optimizer or self.settings.shard_parameters
        at = (key, dp if sharded else 1)
        if at not in self._tables:
            device_type, tp, samples = key
            near = key if samples else (device_type, tp, self.profiles.microbatches.get((device_type, tp), (1,))[0])
            point = interpolate(self.profiles, near)
            self._tables[at] = point if isinstance(point, Gap) else self._table(point, near, dp, idle=not samples)
        return self._tables[at]

    def total_s(self, key: Key) -> float | Gap:
        """Forward and backward of all layers, of a key with samples, without making its table."""
        point = interpolate(self.profiles, key)
        if isinstance(point, Gap):
            return point
        layers_ms = sum(point.layer_ms)
        again_ms = layers_ms * point.forward_share if self.settings.recompute_activations else 0.0
        return (max(layers_ms, point.forward_backward_ms) + again_ms + point.batch_generator_ms) / 1e3

    def get(self, key: Key, dp: int) -> Table:
        """As `find`; raises PlanningError with the reason for a gap."""
        found = self.find(key, dp)
        if isinstance(found, Gap):
            raise PlanningError(found.reason)
        return found

    def _table(self, point: Point, key: Key, dp: int, idle: bool) -> Table:
        model, settings = self.profiles.model, self.settings
        _, tp, samples = key
        layers = np.array(point.layer_ms) / 1e3
        forward, backward = layers * point.forward_share, layers * (1 - point.forward_share)
        forward[0] += point.batch_generator_ms / 1e3
        # What the whole model takes beyond its layers: Metis's forward-backward synchronisation at the last stage.
        backward[-1] += max(0.0, point.forward_backward_ms - sum(point.layer_ms)) / 1e3
        if settings.recompute_activations:
            backward = backward + layers * point.forward_share
        if idle:
            forward, backward = forward * 0, backward * 0

        shards = np.array(self._shards(point, key), dtype=float)
        share = shards / max(shards.sum(), 1.0)
        activations = np.array(point.activation_memory_bytes or (0,) * model.layers, dtype=float)
        state = np.array(point.memory_bytes, dtype=float) - activations
        outputs = np.array(model.activation_bytes, dtype=float) * samples
        if settings.sequence_parallel:
            activations = np.maximum(activations / tp, activations - _REPLICATED_OUTPUTS * outputs * (1 - 1 / tp))
        sharded = settings.shard_optimizer or settings.shard_parameters
        copies = _STATES if settings.shard_parameters else _MOMENTS if sharded else 0
        state = np.maximum(state - copies * shards * (1 - 1 / dp), 0.0)
        optimizer = share * point.optimizer_ms / 1e3 / (dp if sharded else 1)

        flight = activations
        working = np.zeros((model.layers + 1, model.layers + 1))
        if settings.recompute_activations:  # only a layer's input is kept; one layer at a time has the rest
            flight = np.minimum(activations, np.concatenate(([0.0], outputs[:-1])))
            working = _largest(activations - flight)
        if idle:
            flight, working = flight * 0, working * 0
        return Table(
            forward_s=sums(forward),
            backward_s=sums(backward),
            optimizer_s=sums(optimizer),
            fixed_bytes=sums(state) + working,
            flight_bytes=sums(flight),
            shard_bytes=sums(shards),
            source=point.source,
        )

    def _shards(self, point: Point, key: Key) -> tuple[float, ...]:
        return point.parameter_bytes or tuple(size / key[1] for size in self.profiles.model.parameter_bytes)


def sums(values: Floats) -> Floats:
    """(L,) -> (L + 1, L + 1): the sum over [begin, end)."""
    total = np.concatenate(([0.0], np.cumsum(values)))
    return np.asarray(total[None, :] - total[:, None])


def _largest(values: Floats) -> Floats:
    """(L,) -> (L + 1, L + 1): the maximum over [begin, end), 0 for none."""
    count = len(values)
    table = np.zeros((count + 1, count + 1))
    for begin in range(count):
        table[begin, begin + 1 :] = np.maximum.accumulate(values[begin:])
    return table
