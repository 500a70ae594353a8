"""Times of stores into the memory of a peer on the same host, and a flag after them: what fused kernels do."""

from __future__ import annotations

import os
import time

import torch

from ..errors import ProbeError
from ..planner.measurements import Point
from ..runtime.groups import Group, timeout_s
from ..runtime.memory import SymmetricMemory
from .messages import SIZES, one_way, point, quietest

_REPETITIONS = 15
_FLAGS_BYTES = 4096


class Storer:
    """This rank's symmetric memory: two flags for each rank, then room for the largest store. Collective, on CPUs."""

    def __init__(self, group: Group) -> None:
        self.group = group
        flags_bytes = -(-16 * group.size // _FLAGS_BYTES) * _FLAGS_BYTES
        memory = SymmetricMemory(group, flags_bytes + SIZES[-1], torch.device("cpu"))
        self._flags = [None if s is None else s[:flags_bytes].view(torch.int64).numpy() for s in memory.segments]
        self._data = [None if s is None else s[flags_bytes:] for s in memory.segments]
        self._source = torch.full((SIZES[-1],), group.rank + 1, dtype=torch.uint8)
        self._sent, self._seen = [0] * group.size, [0] * group.size

    def reaches(self, peer: int) -> bool:
        return peer != self.group.rank and self._flags[peer] is not None

    def one_way(self, source: int, destination: int) -> list[Point]:
        """Points of stores from one to the other, at the source; called by both.

        The destination waits for the source's flag, and the source for the destination's in answer. Python polls the
        flags, which adds about a microsecond.
        """
        points = []
        # The smallest again before every other size, as messages do.
        for nbytes in (each for size in SIZES[1:] for each in (SIZES[0], size)):
            times = []
            for _ in range(1 + _REPETITIONS):
                start = time.perf_counter()
                if self.group.rank == source:
                    self._store(destination, nbytes)
                    self._raise(destination)
                    self._wait(destination)
                else:
                    self._wait(source)
                    self._raise(source)
                times.append(time.perf_counter() - start)
            points.append(point(nbytes, times))
            if self.group.rank == destination and not bool((self._own[:nbytes] == source + 1).all()):
                raise ProbeError(f"rank {destination}: of {nbytes} bytes that rank {source} stored, not all are here")
        return one_way(quietest(points)) if self.group.rank == source else []

    def all_pairs(self) -> dict[int, list[Point]]:
        """Points to every peer on this host, one after the other and without flags, while all ranks store; called by
        all."""
        peers = [(self.group.rank + k) % self.group.size for k in range(1, self.group.size)]
        peers = [peer for peer in peers if self.reaches(peer)]
        points: dict[int, list[Point]] = {peer: [] for peer in peers}
        for nbytes in SIZES:
            self.group.exchange(None)
            times: dict[int, list[float]] = {peer: [] for peer in peers}
            for _ in range(1 + _REPETITIONS):
                for peer in peers:
                    start = time.perf_counter()
                    self._store(peer, nbytes)
                    times[peer].append(time.perf_counter() - start)
            for peer in peers:
                points[peer].append(point(nbytes, times[peer]))
        return points

    @property
    def _own(self) -> torch.Tensor:
        own = self._data[self.group.rank]
        assert own is not None
        return own

    def _store(self, peer: int, nbytes: int) -> None:
        there = self._data[peer]
        assert there is not None
        there[:nbytes].copy_(self._source[:nbytes])

    def _raise(self, peer: int) -> None:
        flags = self._flags[peer]
        assert flags is not None
        self._sent[peer] += 1
        flags[self.group.rank] = self._sent[peer]

    def _wait(self, peer: int) -> None:
        """Until the peer has raised its flag here once more."""
        flags = self._flags[self.group.rank]
        assert flags is not None
        self._seen[peer] += 1
        expected, polls, deadline = self._seen[peer], 0, time.monotonic() + timeout_s()
        while flags[peer] < expected:
            polls += 1
            if polls % 64 == 0:
                os.sched_yield()  # another rank may need this core
                if time.monotonic() > deadline:
                    raise ProbeError(f"rank {self.group.rank}: rank {peer} raised no flag within {timeout_s():g} s")
