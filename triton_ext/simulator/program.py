"""One simulated program: its accesses to memory, and what it has seen of the others.

A program is two components of the clocks: the thread that does scalar operations, and the others, which share the work
on tensors. A barrier orders them; the result of a scalar atomic, which all threads get, orders it before them. So a
tensor's stores are ordered before a release of the same program by a barrier only, as on a GPU.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .memory import LOCAL, SYSTEM, Conflict, FirstWrite, Region
from .values import Element

if TYPE_CHECKING:
    from .machine import Machine

_MAX_ITERATIONS = 1_000_000  # of a loop that waits for nothing


@dataclass(eq=False)
class Pending:
    """A tensor's store that is not visible yet. is_ordered: a barrier came after it, so a release has to deliver it."""

    region: Region
    dtype: Any
    elements: Any
    raw: Any
    is_ordered: bool = False

    def deliver(self) -> None:
        self.region.view(self.dtype)[self.elements] = self.raw


_RMW: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda old, value: old + value, "fadd": lambda old, value: old + value,
    "and": lambda old, value: old & value, "or": lambda old, value: old | value,
    "xor": lambda old, value: old ^ value, "exch": lambda old, value: value,
    "max": lambda old, value: max(old, value), "min": lambda old, value: min(old, value),
}  # fmt: skip


def _swapped(operation: Callable[[Any, Any], Any], value: Any, old: Any) -> Any:
    return operation(old, value)


def _exchanged(expected: Any, value: Any, old: Any) -> Any:
    return value if old == expected else old


class Program:
    """What a translated kernel calls `m`."""

    def __init__(
        self, machine: Machine, rank: int, run: int, index: int, component: int, clock: Any, grid: tuple[int, int, int]
    ) -> None:
        self.machine, self.rank, self.run, self.index = machine, rank, run, index
        self.scalars, self.tensors = component, component + 1
        self.scalar_clock, self.tensor_clock = clock.copy(), clock.copy()
        self.num_programs = grid
        self.program_id = (index % grid[0], index // grid[0] % grid[1], index // (grid[0] * grid[1]))
        self.ticket: int | None = None
        self.pending: list[Pending] = []
        self.polled: list[tuple[Region, int, int]] = []  # words that this iteration of a loop looked at
        self.blocked_on: list[tuple[Region, int, int]] = []
        self._wrote = False
        self._iterations = 0
        self._tick()

    def _tick(self) -> None:
        self.scalar_clock[self.scalars] += 1
        self.tensor_clock[self.tensors] += 1

    # -- waiting ----------------------------------------------------------------------------------------------

    def begin_iteration(self) -> None:
        self.polled = []
        self._wrote = False
        self._iterations += 1
        if self._iterations > _MAX_ITERATIONS:
            self.machine.fail("livelock", self, None, f"a loop went on for {_MAX_ITERATIONS} iterations")

    def spins(self) -> bool:
        """Whether the iteration only looked at words that others write: it is repeated when one of them changes."""
        return bool(self.polled) and not self._wrote

    def is_blocked(self) -> bool:
        return bool(self.blocked_on) and all(region.version[unit] == seen for region, unit, seen in self.blocked_on)

    # -- access -----------------------------------------------------------------------------------------------

    def is_shared(self, pointer: Any, mask: Any) -> bool:
        """Whether an access is one at which others may come first."""
        if isinstance(pointer, np.ndarray):
            if mask is not None:
                if not np.any(mask):
                    return False
                pointer = np.broadcast_to(pointer, mask.shape).flat[int(np.argmax(mask))]
            else:
                pointer = pointer.flat[0]
        elif mask is not None and not mask:
            return False
        region = self.machine.memory.find(int(pointer))
        return region is not None and region.is_shared

    def _regions(self, site: int, verb: str, addresses: Any, size_bytes: int) -> Iterator[tuple[Region, Any]]:
        """The regions that addresses lie in, each with a selection of them; a fault for one that lies in none."""
        find = self.machine.memory.find
        rest: Any = None
        while True:
            left = addresses if rest is None else addresses[rest]
            if not left.size:
                return
            region = find(int(left[0]))
            if region is None:
                self.machine.fail(
                    "out of bounds", self, site,
                    f"{verb} {self.machine.memory.nearest(int(left[0]))}: no tensor of the launch is there",
                )  # fmt: skip
            inside = (addresses >= region.start) & (addresses < region.end)
            self._check_address(site, verb, region, addresses[inside], size_bytes)
            if rest is None and inside.all():
                yield region, slice(None)
                return
            yield region, inside
            rest = ~inside if rest is None else rest & ~inside

    def _check_address(self, site: int, verb: str, region: Region, addresses: Any, size_bytes: int) -> None:
        offsets = addresses - region.start
        if (offsets + size_bytes > region.data.size).any():
            self.machine.fail("out of bounds", self, site, f"{verb} across the end of the {region.label}")
        if (offsets % size_bytes).any():
            at = int(offsets[offsets % size_bytes != 0][0])
            self.machine.fail(
                "misaligned", self, site, f"{verb} {size_bytes} bytes at offset {at} of the {region.label}"
            )

    def _check_order(self, site: int, verb: str, region: Region, conflict: Conflict | None) -> None:
        if conflict is not None:
            other = self.machine.who(conflict.component)
            before = "written" if conflict.was_write else "read"
            self.machine.fail(
                "race", self, site,
                f"{verb} {region.describe(conflict.index)}, {before} by {other}: nothing orders the two",
                other=conflict.component,
            )  # fmt: skip

    def load(self, site: int, element: Element, pointer: Any, mask: Any, other: Any, volatile: bool) -> Any:
        if isinstance(pointer, np.ndarray):
            return self._load_tensor(site, element, pointer, mask, other)
        if mask is not None and not mask:
            return element.scalar(0) if other is None else other
        for region, _ in self._regions(site, "reads", np.array([pointer]), element.size_bytes):
            offset = pointer - region.start
            if region.is_shared:
                unit = offset // region.place.unit_bytes
                if volatile:
                    self._note_poll(region, unit)
                    conflict = region.atomic(unit, self.scalars, self.scalar_clock, self.rank, SYSTEM)
                else:
                    units = region.units(np.array([offset]), element.size_bytes)
                    conflict = region.read(units, self.scalars, self.scalar_clock)
                    self._check_fresh(site, region, units)
                self._check_order(site, "reads", region, conflict)
                self._deliver_own(region)
            return element.scalar(element.decode(region.view(element.stored)[offset // element.size_bytes]))

    def _load_tensor(self, site: int, element: Element, pointer: Any, mask: Any, other: Any) -> Any:
        shape = np.broadcast_shapes(pointer.shape, () if mask is None else np.shape(mask))
        result = np.zeros(shape, element.dtype) if other is None else np.array(np.broadcast_to(other, shape))
        active = np.ones(shape, bool) if mask is None else np.broadcast_to(mask, shape)
        addresses = np.broadcast_to(pointer, shape)[active]
        found = np.zeros(addresses.shape, element.dtype)
        for region, part in self._regions(site, "reads", addresses, element.size_bytes):
            offsets = addresses[part] - region.start
            if region.is_shared:
                self._deliver_own(region)
                units = region.units(offsets, element.size_bytes)
                self._check_order(site, "reads", region, region.read(units, self.tensors, self.tensor_clock))
                self._check_fresh(site, region, units)
                self.machine.note(self, "reads", region, units)
            found[part] = element.decode(region.view(element.stored)[offsets // element.size_bytes])
        result[active] = found
        return result

    def _check_fresh(self, site: int, region: Region, units: Any) -> None:
        """What a run reads of a result or of partial values must be written in the same run."""
        if region.place.is_output:
            runs = region.written_in_run[units]
            if (runs != self.run).any():
                at = int(np.flatnonzero(runs != self.run)[0])
                run = int(runs[at])
                when = f"last written in run {run}" if run >= 0 else "never written"
                self.machine.fail(
                    "stale read", self, site, f"reads {region.describe(int(units[at]))}, {when}: this is run {self.run}"
                )

    def store(self, site: int, element: Element, pointer: Any, value: Any, mask: Any) -> None:
        is_tensor = isinstance(pointer, np.ndarray)
        if not is_tensor:
            if mask is not None and not mask:
                return
            addresses, raw = np.array([pointer]), element.encode(value).reshape(1)
        else:
            shape = np.broadcast_shapes(pointer.shape, () if mask is None else np.shape(mask))
            active = np.ones(shape, bool) if mask is None else np.broadcast_to(mask, shape)
            addresses = np.broadcast_to(pointer, shape)[active]
            raw = np.broadcast_to(element.encode(value), shape)[active]
        component, clock = (self.tensors, self.tensor_clock) if is_tensor else (self.scalars, self.scalar_clock)
        self._wrote = True
        for region, part in self._regions(site, "writes", addresses, element.size_bytes):
            offsets = addresses[part] - region.start
            pending = Pending(region, element.stored, offsets // element.size_bytes, raw[part])
            if not region.is_shared:
                raise FirstWrite(region.place)
            units = region.units(offsets, element.size_bytes)
            self._check_once(site, region, units)
            self._check_order(site, "writes", region, region.write(units, component, clock, self.run))
            self.machine.note(self, "writes", region, units)
            if is_tensor:
                self._deliver_own(region, pending.elements)
                self.pending.append(pending)
            else:
                pending.deliver()
                region.version[units] += 1

    def _check_once(self, site: int, region: Region, units: Any) -> None:
        if region.place.is_output:
            again = region.written_in_run[units] == self.run
            if not again.any():
                order = np.sort(units)
                repeated = order[1:][order[1:] == order[:-1]]
                if not repeated.size:
                    return
                unit = int(repeated[0])
                text = f"writes {region.describe(unit)} twice in one store"
            else:
                unit = int(units[int(np.flatnonzero(again)[0])])
                by = self.machine.who(int(region.writer[unit]))
                text = f"writes {region.describe(unit)}, which {by} has written in this run already"
            self.machine.fail("double write", self, site, text)

    # -- atomics ----------------------------------------------------------------------------------------------

    def rmw(
        self, site: int, element: Element, kind: str, sem: str, scope: str, pointer: Any, value: Any, mask: Any,
        used: bool,
    ) -> Any:  # fmt: skip
        operation = _RMW[kind.lstrip("u") if kind in ("umax", "umin") else kind]
        if not isinstance(pointer, np.ndarray):
            if mask is not None and not mask:
                return element.scalar(0)
            return self._atomic(site, element, sem, scope, pointer, functools.partial(_swapped, operation, value), used)
        shape = pointer.shape
        active = np.ones(shape, bool) if mask is None else np.broadcast_to(mask, shape)
        values = np.broadcast_to(value, shape)
        result = np.zeros(shape, element.dtype)
        for index in zip(*np.nonzero(active), strict=True):
            update = functools.partial(_swapped, operation, element.scalar(values[index]))
            result[index] = self._atomic(site, element, sem, scope, int(pointer[index]), update, used, of_tensor=True)
        return result

    def cas(self, site: int, element: Element, sem: str, scope: str, pointer: Any, expected: Any, value: Any) -> Any:
        if not isinstance(pointer, np.ndarray):
            update = functools.partial(_exchanged, expected, value)
            return self._atomic(site, element, sem, scope, pointer, update, used=True)
        result = np.zeros(pointer.shape, element.dtype)
        for index in np.ndindex(pointer.shape):
            update = functools.partial(_exchanged, element.scalar(expected[index]), element.scalar(value[index]))
            result[index] = self._atomic(
                site, element, sem, scope, int(pointer[index]), update, used=True, of_tensor=True
            )
        return result

    def _atomic(
        self, site: int, element: Element, sem: str, scope: str, address: int, operation: Callable[[Any], Any],
        used: bool, of_tensor: bool = False,
    ) -> Any:  # fmt: skip
        component, clock = (self.tensors, self.tensor_clock) if of_tensor else (self.scalars, self.scalar_clock)
        [(region, _)] = self._regions(site, "updates", np.array([address]), element.size_bytes)
        offset = address - region.start
        index = offset // element.size_bytes
        if not region.is_shared:
            raise FirstWrite(region.place)
        view = region.view(element.stored)
        unit = offset // region.place.unit_bytes
        width = SYSTEM if scope == "sys" else LOCAL
        self._check_order(site, "updates", region, region.atomic(unit, component, clock, self.rank, width))
        if sem in ("acquire", "acq_rel") and scope != "cta":
            region.acquire(unit, clock, self.rank, width)
        if sem in ("release", "acq_rel") and scope != "cta":
            self.deliver(lambda pending: pending.is_ordered)
            region.release(unit, clock, self.rank, width)
            self._tick()
        if used and not of_tensor:
            np.maximum(self.tensor_clock, self.scalar_clock, out=self.tensor_clock)
        old = element.scalar(element.decode(view[index]))
        new = element.encode(operation(old))
        changed = new != view[index]
        self._wrote |= bool(changed)
        view[index] = new
        region.version[unit] += int(changed)
        self._note_poll(region, unit)
        if changed:
            self.machine.note(self, f"{sem} {scope}", region, unit, f"{old} -> {element.scalar(new)}")
        if region.place.words.get(unit) == "TICKETS":
            self.ticket = old - self.run * math.prod(self.num_programs)
        return old

    def _note_poll(self, region: Region, unit: int) -> None:
        self.polled.append((region, unit, int(region.version[unit])))

    def barrier(self, site: int) -> None:
        np.maximum(self.scalar_clock, self.tensor_clock, out=self.scalar_clock)
        self.tensor_clock[:] = self.scalar_clock
        self._tick()
        for pending in self.pending:
            pending.is_ordered = True

    def nvshmem(self, site: int, symbol: str, *args: Any) -> int:
        """A call of NVSHMEM, by the program's first thread."""
        self._wrote = True
        if symbol == "nvshmem_putmem_signal_nbi":
            target, source, nbytes, signal, count, _, _ = map(int, args)
            self.machine.put(self, target, source, nbytes, signal, count)
        elif symbol == "nvshmemx_signal_op":
            signal, count, _, _ = map(int, args)
            self.machine.put(self, 0, 0, 0, signal, count)
        elif symbol == "nvshmem_signal_wait_until":
            signal, _, count = map(int, args)
            self._receive(site, signal, count)
        else:
            self.machine.fail("not simulated", self, site, f"calls {symbol}")
        self._tick()
        return 0

    def _receive(self, site: int, signal: int, count: int) -> None:
        [(region, _)] = self._regions(site, "waits for", np.array([signal]), 8)
        unit = (signal - region.start) // 8
        if region.view(np.dtype(np.int64))[unit] < count:
            self.machine.fail(
                "deadlock", self, site, f"waits in NVSHMEM, without a timeout, for {region.describe(unit)}"
            )
        if (landed := self.machine.landed.get(signal)) is not None:
            np.maximum(self.scalar_clock, landed, out=self.scalar_clock)

    def check(self, site: int, condition: Any, message: str) -> None:
        if not np.all(condition):
            self.machine.fail("assertion", self, site, message)

    # -- delivery ---------------------------------------------------------------------------------------------

    def deliver(self, which: Callable[[Pending], bool] = lambda pending: True) -> None:
        """Make stores visible, oldest first."""
        kept = []
        for pending in self.pending:
            if which(pending):
                pending.deliver()
            else:
                kept.append(pending)
        self.pending = kept

    def _deliver_own(self, region: Region, elements: Any = None) -> None:
        """A program sees its own stores, and they reach one place in order."""
        if self.pending:
            self.deliver(
                lambda pending: (
                    pending.region is region and (elements is None or bool(np.isin(pending.elements, elements).any()))
                )
            )

    def deliver_one(self, choose: Callable[[int], int]) -> None:
        """Make a part of one store visible."""
        pending = self.pending[choose(len(self.pending))]
        if len(pending.elements) > 1:
            cut = 1 + choose(len(pending.elements) - 1)
            Pending(pending.region, pending.dtype, pending.elements[:cut], pending.raw[:cut]).deliver()
            pending.elements, pending.raw = pending.elements[cut:], pending.raw[cut:]
        else:
            pending.deliver()
            self.pending.remove(pending)
