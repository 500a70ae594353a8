"""Transfers that share what carries them: max-min fair, recomputed whenever one starts or ends."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

Resource = Hashable  # a link, or one direction of a device's port to its node's fabric


@dataclass(eq=False)
class Flow:
    """Bytes on their way over resources, each of which it uses from start to end."""

    remaining_bytes: float
    resources: tuple[Resource, ...]
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
    _users: dict[Resource, dict[Flow, None]] = field(default_factory=dict)  # dict: a set in order of insertion

    def start(self, flow: Flow, now_s: float) -> list[Flow]:
        """Add a flow; returns the flows whose rate has changed, itself included."""
        flow.updated_s = now_s
        for resource in flow.resources:
            self._users.setdefault(resource, {})[flow] = None
        return self._share(self._connected([flow]), now_s)

    def end(self, flow: Flow, now_s: float) -> list[Flow]:
        """Take a flow away; returns the flows whose rate has changed."""
        touched = []
        for resource in flow.resources:
            users = self._users[resource]
            del users[flow]
            touched.extend(users)
        return self._share(self._connected(touched), now_s)

    def _connected(self, flows: Iterable[Flow]) -> list[Flow]:
        found: dict[Flow, None] = {}
        pending = list(flows)
        while pending:
            flow = pending.pop()
            if flow in found:
                continue
            found[flow] = None
            for resource in flow.resources:
                pending.extend(other for other in self._users[resource] if other not in found)
        return list(found)

    def _share(self, flows: list[Flow], now_s: float) -> list[Flow]:
        room = {resource: self.capacity[resource] for flow in flows for resource in flow.resources}
        open_flows = dict.fromkeys(flows)
        changed = []
        while open_flows:
            rate, bottleneck = math.inf, None
            for resource in room:
                users = sum(user in open_flows for user in self._users[resource])
                if users and room[resource] / users < rate:
                    rate, bottleneck = room[resource] / users, resource
            assert bottleneck is not None  # every flow uses at least one resource
            for flow in [user for user in self._users[bottleneck] if user in open_flows]:
                del open_flows[flow]
                for resource in flow.resources:
                    room[resource] -= rate
                if not math.isclose(rate, flow.rate, rel_tol=1e-12):
                    flow.remaining_bytes = max(0.0, flow.remaining_bytes - flow.rate * (now_s - flow.updated_s))
                    flow.rate, flow.updated_s = rate, now_s
                    flow.version += 1
                    changed.append(flow)
        return changed
