"""Transfers that share what carries them: max-min fair, recomputed whenever one starts or ends."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

Resource = tuple[str, int]  # ("link", index), or a direction of a device's port: ("out", device), ("in", device)
Loads = tuple[tuple[Resource, float], ...]


@dataclass(eq=False)
class Flow:
    """Bytes on their way, from start to end over every resource of `loads`: so many times as the number says (a flow
    stands for several equal ones)."""

    remaining_bytes: float
    loads: Loads
    rate: float = 0.0  # bytes/s, since `updated_s`
    updated_s: float = 0.0
    version: int = 0  # of the rate; an end predicted for an older version is void

    @property
    def end_s(self) -> float:
        return self.updated_s + self.remaining_bytes / self.rate


@dataclass
class FlowNetwork:
    """Active flows over resources with a capacity in bytes/s.

    Rates are max-min fair (progressive filling: Bertsekas and Gallager, Data Networks, 6.5.2): all rise together until
    a resource is full, which fixes those that use it. Only flows that share resources, directly or through others,
    are recomputed.
    """

    capacity: dict[Resource, float]
    _users: dict[Resource, dict[Flow, float]] = field(default_factory=dict)  # in order of insertion

    def start(self, flow: Flow, now_s: float) -> list[Flow]:
        """Add a flow; returns the flows whose rate has changed, itself included."""
        flow.updated_s = now_s
        alone = True
        for resource, load in flow.loads:
            users = self._users.setdefault(resource, {})
            alone = alone and not users
            users[flow] = load
        if alone:
            flow.rate = min(self.capacity[resource] / load for resource, load in flow.loads)
            return [flow]
        return self._share(self._connected([flow]), now_s)

    def end(self, flow: Flow, now_s: float) -> list[Flow]:
        """Take a flow away; returns the flows whose rate has changed."""
        touched: list[Flow] = []
        for resource, _ in flow.loads:
            users = self._users[resource]
            del users[flow]
            touched.extend(users)
        return self._share(self._connected(touched), now_s) if touched else []

    def _connected(self, flows: Iterable[Flow]) -> list[Flow]:
        found: dict[Flow, None] = {}
        pending = list(flows)
        while pending:
            flow = pending.pop()
            if flow in found:
                continue
            found[flow] = None
            for resource, _ in flow.loads:
                pending.extend(other for other in self._users[resource] if other not in found)
        return list(found)

    def _share(self, flows: list[Flow], now_s: float) -> list[Flow]:
        room = {resource: self.capacity[resource] for flow in flows for resource, _ in flow.loads}
        waiting = dict.fromkeys(flows)
        changed = []
        while waiting:
            rate, bottleneck = math.inf, None
            for resource in room:
                load = sum(load for user, load in self._users[resource].items() if user in waiting)
                if load and room[resource] / load < rate:
                    rate, bottleneck = room[resource] / load, resource
            assert bottleneck is not None  # every flow uses at least one resource
            for flow in [user for user in self._users[bottleneck] if user in waiting]:
                del waiting[flow]
                for resource, load in flow.loads:
                    room[resource] = max(0.0, room[resource] - rate * load)
                if not math.isclose(rate, flow.rate, rel_tol=1e-12):
                    flow.remaining_bytes = max(0.0, flow.remaining_bytes - flow.rate * (now_s - flow.updated_s))
                    flow.rate, flow.updated_s = rate, now_s
                    flow.version += 1
                    changed.append(flow)
        return changed
