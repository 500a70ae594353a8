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
    _touched: dict[Flow, None] = field(default_factory=dict)  # flows that share with one that came or went

    def start(self, flow: Flow, now_s: float) -> None:
        """Add a flow; it has a rate after `settle`."""
        flow.updated_s = now_s
        for resource, load in flow.loads:
            self._users.setdefault(resource, {})[flow] = load
        self._touched[flow] = None

    def end(self, flow: Flow) -> None:
        """Take a flow away."""
        self._touched.pop(flow, None)
        for resource, _ in flow.loads:
            users = self._users[resource]
            del users[flow]
            self._touched.update(dict.fromkeys(users))

    def settle(self, now_s: float) -> list[Flow]:
        """Rates after everything that came and went at one time; returns the flows whose rate has changed."""
        if not self._touched:
            return []
        flows, used = self._connected(self._touched)
        self._touched.clear()
        return self._share(flows, used, now_s)

    def _connected(self, flows: Iterable[Flow]) -> tuple[dict[Flow, None], set[Resource]]:
        """All flows that share with these, directly or through others, and what they use."""
        found, used = dict.fromkeys(flows), set[Resource]()
        pending = list(found)
        while pending:
            for resource, _ in pending.pop().loads:
                if resource not in used:
                    used.add(resource)
                    fresh = [flow for flow in self._users[resource] if flow not in found]
                    found.update(dict.fromkeys(fresh))
                    pending += fresh
        return found, used

    def _share(self, flows: dict[Flow, None], used: set[Resource], now_s: float) -> list[Flow]:
        room = {resource: self.capacity[resource] for resource in used}
        load = {resource: sum(self._users[resource].values()) for resource in used}
        waiting, changed = dict(flows), []
        while waiting:
            # The fullest one; ties by name, since a set has no order.
            rate, bottleneck = min((room[resource] / load[resource], resource) for resource in load)
            for flow in [user for user in self._users[bottleneck] if user in waiting]:
                del waiting[flow]
                for resource, part in flow.loads:
                    room[resource] = max(0.0, room[resource] - rate * part)
                    load[resource] -= part
                if not math.isclose(rate, flow.rate, rel_tol=1e-12):
                    flow.remaining_bytes = max(0.0, flow.remaining_bytes - flow.rate * (now_s - flow.updated_s))
                    flow.rate, flow.updated_s = rate, now_s
                    flow.version += 1
                    changed.append(flow)
            load = {resource: left for resource, left in load.items() if left > 1e-9}
        return changed
