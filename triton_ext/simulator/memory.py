"""Simulated memory: named regions at the addresses that the real ones have, and what is known of each element.

A *shared* region remembers, per element, who wrote and who read it last. Threads of execution are *components* of
vector clocks (Lamport 1978; the compact form per element is FastTrack's, Flanagan and Freund, PLDI 2009).
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Clock = Any  # int32[components]: what a component has seen of each of them
LOCAL, SYSTEM = 0, 1  # scope of an atomic access: the programs of a rank, or of all ranks


@dataclass(frozen=True)
class Place:
    """A region before a simulation: where it is, and what it holds.

    is_shared: written by programs, so that the order of accesses matters. unit_bytes: size of the elements whose
    history is then kept. is_output: of the result or the staging area, which every run has to write anew.
    """

    name: str
    rank: int
    address: int
    content: np.ndarray[Any, np.dtype[np.uint8]]
    unit_bytes: int = 8
    is_shared: bool = False
    is_output: bool = False
    shape: tuple[int, ...] = ()
    words: dict[int, str] = field(default_factory=dict)  # what elements are called
    per_run: dict[int, int] = field(default_factory=dict)  # by how much an element grows in a run


class FirstWrite(Exception):
    """A program writes to memory that was taken for read-only: a simulation with it as shared has to begin anew."""

    def __init__(self, place: Place) -> None:
        super().__init__(place.name)
        self.place = place


@dataclass
class Conflict:
    """An access that is not ordered with an earlier one of another component."""

    index: int
    component: int
    was_write: bool


@dataclass
class Region:
    place: Place
    data: np.ndarray[Any, np.dtype[np.uint8]] = field(init=False)

    def __post_init__(self) -> None:
        self.data = self.place.content.copy()
        self.start, self.end = self.place.address, self.place.address + self.data.size
        self.is_shared = self.place.is_shared
        self._views: dict[np.dtype[Any], Any] = {}
        if self.is_shared:
            count = -(-self.data.size // self.place.unit_bytes)
            self.writer = np.full(count, -1, np.int32)
            self.write_clock = np.zeros(count, np.int32)
            self.written_in_run = np.full(count, -1, np.int32)
            self.version = np.zeros(count, np.int32)
            self.released: dict[tuple[int, int], Clock] = {}  # (element, rank or -1 for all) -> clock
            self._atomics: dict[int, dict[int, tuple[int, int, int]]] = {}  # element -> component -> clock, rank, scope
            self._readers: dict[int, int] = {}  # component -> row of _reads
            self._reads = np.zeros((4, count), np.int32)

    @property
    def label(self) -> str:
        return f"{self.place.name} of rank {self.place.rank}"

    def view(self, dtype: np.dtype[Any]) -> Any:
        found = self._views.get(dtype)
        if found is None:
            usable = self.data.size // dtype.itemsize * dtype.itemsize
            found = self._views[dtype] = self.data[:usable].view(dtype)
        return found

    def units(self, offsets: Any, size_bytes: int) -> Any:
        """The elements, by number, that accesses of size_bytes at byte offsets touch."""
        unit = self.place.unit_bytes
        first = offsets // unit
        if size_bytes <= unit:
            return first
        return (np.asarray(first)[..., None] + np.arange(size_bytes // unit)).reshape(-1)

    def describe(self, unit: int) -> str:
        """An element in the author's terms."""
        if unit in self.place.words:
            return f"{self.place.words[unit]} at rank {self.place.rank}"
        if self.place.shape:
            return f"element {tuple(int(i) for i in np.unravel_index(unit, self.place.shape))} of the {self.label}"
        return f"element {unit} of the {self.label}"

    # -- history ----------------------------------------------------------------------------------------------

    def read(self, units: Any, component: int, clock: Clock) -> Conflict | None:
        """Note a plain read; the write that it races with, if there is one."""
        row = self._readers.get(component)
        if row is None:
            row = self._readers[component] = len(self._readers)
            if row == len(self._reads):
                self._reads = np.concatenate([self._reads, np.zeros_like(self._reads)])
        self._reads[row, units] = clock[component]
        return self._unordered_write(units, component, clock) or self._unordered_atomic(units, component, clock)

    def write(self, units: Any, component: int, clock: Clock, run: int) -> Conflict | None:
        """Note a write; the access that it races with, if there is one."""
        found = (
            self._unordered_write(units, component, clock)
            or self._unordered_read(units, component, clock)
            or self._unordered_atomic(units, component, clock)
        )
        self.writer[units] = component
        self.write_clock[units] = clock[component]
        self.written_in_run[units] = run
        return found

    def atomic(self, unit: int, component: int, clock: Clock, rank: int, scope: int) -> Conflict | None:
        """Note an atomic access of a word. Two of them never race if each one's scope includes the other's rank."""
        accesses = self._atomics.setdefault(unit, {})
        found: Conflict | None = None
        for other, (when, other_rank, other_scope) in accesses.items():
            if other_rank != rank and LOCAL in (scope, other_scope) and when > clock[other]:
                found = Conflict(unit, other, True)
        accesses[component] = (int(clock[component]), rank, scope)
        units = np.array([unit])
        return found or self._unordered_write(units, component, clock) or self._unordered_read(units, component, clock)

    def _unordered_write(self, units: Any, component: int, clock: Clock) -> Conflict | None:
        writers = self.writer[units]
        bad = (self.write_clock[units] > clock[writers]) & (writers >= 0) & (writers != component)
        return self._conflict(units, bad, writers, True) if bad.any() else None

    def _unordered_read(self, units: Any, component: int, clock: Clock) -> Conflict | None:
        if not self._readers:
            return None
        readers = np.fromiter(self._readers, np.int32, len(self._readers))
        bad = self._reads[: len(readers), units] > clock[readers][:, None]
        bad[readers == component] = False
        if not bad.any():
            return None
        row = int(np.flatnonzero(bad.any(1))[0])
        return self._conflict(units, bad[row], np.full(bad.shape[1], readers[row]), False)

    def _unordered_atomic(self, units: Any, component: int, clock: Clock) -> Conflict | None:
        if not self._atomics:
            return None
        for unit in np.atleast_1d(units).tolist():
            for other, (when, *_) in self._atomics.get(unit, {}).items():
                if other != component and when > clock[other]:
                    return Conflict(unit, other, True)
        return None

    @staticmethod
    def _conflict(units: Any, bad: Any, components: Any, was_write: bool) -> Conflict:
        at = int(np.flatnonzero(bad)[0])
        return Conflict(int(np.atleast_1d(units)[at]), int(np.atleast_1d(components)[at]), was_write)

    def release(self, unit: int, clock: Clock, rank: int, scope: int) -> None:
        """What an acquire of this word will see: at the scope of `rank`, or of all ranks."""
        for key in ((unit, rank), (unit, -1)) if scope == SYSTEM else ((unit, rank),):
            before = self.released.get(key)
            self.released[key] = clock.copy() if before is None else np.maximum(before, clock)

    def acquire(self, unit: int, clock: Clock, rank: int, scope: int) -> None:
        """Join, in place, what was released to this word."""
        for key in ((unit, rank), (unit, -1)) if scope == SYSTEM else ((unit, rank),):
            if (seen := self.released.get(key)) is not None:
                np.maximum(clock, seen, out=clock)


class Memory:
    """All regions of a simulation."""

    def __init__(self, places: list[Place]) -> None:
        self.regions = sorted((Region(place) for place in places if place.content.size), key=lambda r: r.start)
        self._starts = [region.start for region in self.regions]

    def find(self, address: int) -> Region | None:
        index = bisect.bisect_right(self._starts, address) - 1
        if index < 0 or address >= self.regions[index].end:
            return None
        return self.regions[index]

    def nearest(self, address: int) -> str:
        """Where an address outside all regions is."""
        index = max(bisect.bisect_right(self._starts, address) - 1, 0)
        if not self.regions:
            return f"address {address:#x}"
        region = self.regions[index]
        distance = address - region.end if address >= region.end else address - region.start
        side = "behind the end" if address >= region.end else "before the start"
        return f"{abs(distance)} bytes {side} of the {region.label}"
