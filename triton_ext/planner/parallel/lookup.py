"""Points for a search: measured, else interpolated, else (where allowed) modelled; each found once."""

from __future__ import annotations

from functools import cached_property

from ..cluster import Cluster
from .completion import interpolate
from .profiles import Gap, Key, Point, Profiles
from .roofline import Work, modelled, transformer_work


class Lookup:
    """model_missing: what no profile reaches comes from the roofline, scaled from the cluster's profiled types."""

    def __init__(self, profiles: Profiles, cluster: Cluster, model_missing: bool = False) -> None:
        self.profiles = profiles
        self._types = {device_type.name: device_type for device_type in cluster.device_types}
        self._model_missing = model_missing
        self._found: dict[Key, Point | Gap] = {}

    def get(self, device_type: str, tp: int, samples: int) -> Point | Gap:
        key = (device_type, tp, samples)
        found = self._found.get(key)
        if found is None:
            found = interpolate(self.profiles, key)
            if isinstance(found, Gap) and self._model_missing:
                found = modelled(self.profiles, self._types, key, self._work)
            self._found[key] = found
        return found

    @cached_property
    def _work(self) -> Work:
        return transformer_work(self.profiles.model)

    def smallest(self, device_type: str, tp: int) -> tuple[int, Point] | Gap:
        """The point of the fewest samples at a degree, and how many they are: of 1 sample if possible."""
        one = self.get(device_type, tp, 1)
        if isinstance(one, Point):
            return 1, one
        sizes = self.profiles.microbatches.get((device_type, tp))
        return (sizes[0], self.profiles.points[device_type, tp, sizes[0]]) if sizes else one
