"""Network cards: what NVSHMEM was asked to send, done later, in any order and in parts.

A put is a component of the clocks. It reads the outbox and writes at the peer ordered behind the program that asked
for it; its signal tells the peer what that program had seen, but not that the data is there: for that, a program has to
call NVSHMEM's wait, even if it has seen the signal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .memory import SYSTEM, Clock, Conflict, Region

if TYPE_CHECKING:
    from .machine import Machine


@dataclass(eq=False)
class Put:
    """nbytes from `source` to `target`, then `count` is added to `signal`.

    said: what the signal tells. clock: of the put itself. done: bytes that are there.
    """

    rank: int
    run: int
    component: int
    said: Clock
    clock: Clock
    source: int
    target: int
    nbytes: int
    signal: int
    count: int
    done: int = 0

    def advance(self, machine: Machine) -> bool:
        """Do a part of it; True when that was the last one."""
        if self.done < self.nbytes:
            self._copy(machine)
            return False
        region, unit = _word(machine, self.signal)
        self._check(machine, "adds to", region, region.atomic(unit, self.component, self.clock, self.rank, SYSTEM))
        region.release(unit, self.said, self.rank, SYSTEM)
        landed = machine.landed.setdefault(self.signal, np.zeros_like(self.clock))
        np.maximum(landed, self.clock, out=landed)
        region.view(np.dtype(np.int64))[unit] += self.count
        region.version[unit] += 1
        return True

    def _copy(self, machine: Machine) -> None:
        me = machine.who(self.component)
        source, target = (machine.memory.find(address + self.done) for address in (self.source, self.target))
        if source is None or target is None:
            at = self.source + self.done if source is None else self.target + self.done
            machine.fail(
                "out of bounds", None, None, f"{machine.who(self.component)} copies {machine.memory.nearest(at)}"
            )
        unit = target.place.unit_bytes
        left = (self.nbytes - self.done) // unit
        units = 1 + machine.schedule.random.randrange(left)
        start, end = self.source + self.done - source.start, self.target + self.done - target.start
        read, written = (np.arange(units) + offset // unit for offset in (start, end))
        self._check(machine, "reads", source, source.read(read, self.component, self.clock))
        stale = source.written_in_run[read] != self.run
        if stale.any():
            at = int(read[stale][0])
            machine.fail("stale read", None, None, f"{me} reads {source.describe(at)}, not of run {self.run}")
        if (target.written_in_run[written] == self.run).any():
            machine.fail("double write", None, None, f"{me} writes the {target.label} twice")
        self._check(machine, "writes", target, target.write(written, self.component, self.clock, self.run))
        target.data[end : end + units * unit] = source.data[start : start + units * unit]
        self.done += units * unit

    def _check(self, machine: Machine, verb: str, region: Region, conflict: Conflict | None) -> None:
        if conflict is not None:
            before = "written" if conflict.was_write else "read"
            machine.fail(
                "race", None, None,
                f"{machine.who(self.component)} {verb} {region.describe(conflict.index)}, {before} by "
                f"{machine.who(conflict.component)}: nothing orders the two",
            )  # fmt: skip


def _word(machine: Machine, address: int) -> tuple[Region, Any]:
    region = machine.memory.find(address)
    if region is None or not region.is_shared or region.place.unit_bytes != 8:
        machine.fail("out of bounds", None, None, f"a signal {machine.memory.nearest(address)}")
    return region, (address - region.start) // 8
