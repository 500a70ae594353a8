"""Runs the programs of all ranks, interleaved at their shared accesses by a schedule."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from ..passes import abi
from .card import Put
from .memory import Memory, Place, Region
from .program import Program
from .report import Finding, place_of
from .schedule import Action, Schedule
from .translate import Code

_TRACE = 12  # events that a finding shows
_PUTS = 1000  # components of the clocks for what network cards do
_STEPS = 3_000_000  # a simulation that takes more never ends
_FAILURES = {value: name for name, value in vars(abi).items() if name.startswith("FAILED_")}


class Found(Exception):
    """Ends a simulation."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding


@dataclass
class Launch:
    """What one rank launches, again in every run: the code, its arguments, and its grid."""

    code: Code
    arguments: Sequence[Any]
    grid: tuple[int, int, int]


@dataclass
class _Rank:
    """A rank's stream. clock: what is ordered before its next run."""

    index: int
    clock: Any
    run: int = -1
    waiting: list[int] = field(default_factory=list)
    active: dict[int, tuple[Program, Any]] = field(default_factory=dict)
    ended: list[Program] = field(default_factory=list)


class Machine:
    """One simulation. places: all memory. check(rank, run, result) -> what is wrong with a result, or None.

    resident: how many programs of a rank can be under way at once. partial: whether a run may leave elements of the
    result as they were.
    """

    def __init__(
        self,
        launches: Sequence[Launch],
        places: Sequence[Place],
        seed: int,
        runs: int,
        resident: int,
        partial: bool = False,
        check: Callable[[int, int, Region], str | None] | None = None,
    ) -> None:
        self.launches, self.seed, self.runs, self.resident, self.partial = launches, seed, runs, resident, partial
        self.check = check
        self.memory = Memory(list(places))
        self.world = len(launches)
        self.programs = [math.prod(launch.grid) for launch in launches]
        self.schedule = Schedule(seed, self.world, max(self.programs))
        self._first = np.concatenate([[0], np.cumsum(self.programs)]).tolist()
        per_run = 2 * self._first[-1]
        self._hosts = per_run * runs  # the components of the hosts come last
        self._cards = self._hosts + self.world  # and behind them, those of the cards, where there are any
        has_cards = any(region.place.name.startswith("outbox") for region in self.memory.regions)
        components = self._cards + (_PUTS if has_cards else 0)
        self.ranks = [_Rank(rank, np.zeros(components, np.int32)) for rank in range(self.world)]
        self.puts: list[Put] = []
        self.landed: dict[int, Any] = {}  # by signal: the clock of a program that has called NVSHMEM's wait for it
        self._put_by: list[int] = []  # ranks, of all puts
        for rank in self.ranks:
            rank.clock[self._hosts + rank.index] = 1
        self.steps = 0
        self.events: collections.deque[tuple[int, Program | None, int, str, Region, Any, str]] = collections.deque(
            maxlen=5000
        )

    # -- the loop ---------------------------------------------------------------------------------------------

    def run(self) -> Finding | None:
        """The first fault, or None."""
        try:
            with np.errstate(all="ignore"):
                while any(self._is_under_way(rank) for rank in self.ranks):
                    actions = self._actions()
                    if not actions:
                        self._deliver_all_or_deadlock()
                        continue
                    self.steps += 1
                    if self.steps > _STEPS:
                        self.fail("livelock", None, None, f"no end after {_STEPS} steps")
                    self._do(self.schedule.choose(actions))
                while self.puts:
                    self._advance(self.puts[0])
                self._check_counts()
        except Found as found:
            return found.finding
        return None

    def _is_under_way(self, rank: _Rank) -> bool:
        return rank.run < self.runs - 1 or bool(rank.waiting or rank.active)

    def _actions(self) -> list[Action]:
        actions = []
        for rank in self.ranks:
            if rank.waiting and len(rank.active) < self.resident:
                actions.append(Action("start", rank.index, rank.waiting[0]))
            elif not rank.waiting and not rank.active and rank.run < self.runs - 1:
                actions.append(Action("launch", rank.index))
            for index, (program, _) in rank.active.items():
                if not program.is_blocked():
                    actions.append(Action("step", rank.index, index))
            if self.schedule.delivery != "late":
                actions += self._card_actions(rank)
            if self.schedule.delivery == "random":
                undelivered = (p for p in [*(p for p, _ in rank.active.values()), *rank.ended] if p.pending)
                actions += [Action("deliver", rank.index, program.index) for program in undelivered]
        if not actions:
            actions = [action for rank in self.ranks for action in self._card_actions(rank)]
        return actions

    def _card_actions(self, rank: _Rank) -> list[Action]:
        return [Action("card", rank.index, n) for n, put in enumerate(self.puts) if put.rank == rank.index]

    def put(self, program: Program, target: int, source: int, nbytes: int, signal: int, count: int) -> None:
        """Have the network card of a program's rank do something, soon."""
        if len(self._put_by) == _PUTS:
            self.fail("too large", program, None, f"asks for more than {_PUTS} puts: simulate fewer runs")
        component = self._cards + len(self._put_by)
        self._put_by.append(program.rank)
        said = program.scalar_clock.copy()
        clock = said.copy()
        clock[component] = 1
        put = Put(program.rank, program.run, component, said, clock, source, target, nbytes, signal, count)
        self.puts.append(put)
        while self.schedule.delivery == "at once" and put in self.puts:
            self._advance(put)

    def _advance(self, put: Put) -> None:
        if put.advance(self):
            self.puts.remove(put)

    def _do(self, action: Action) -> None:
        rank = self.ranks[action.rank]
        if action.kind == "launch":
            rank.run += 1
            rank.waiting = self.schedule.order(self.programs[rank.index])
        elif action.kind == "start":
            self._start(rank, rank.waiting.pop(0))
        elif action.kind == "card":
            self._advance(self.puts[action.program])
        elif action.kind == "deliver":
            program = next(p for p in [*(p for p, _ in rank.active.values()), *rank.ended] if p.index == action.program)
            program.deliver_one(self.schedule.random.randrange)
        else:
            self._step(rank, action.program)

    def _start(self, rank: _Rank, index: int) -> None:
        launch = self.launches[rank.index]
        component = 2 * (rank.run * self._first[-1] + self._first[rank.index] + index)
        program = Program(self, rank.index, rank.run, index, component, rank.clock, launch.grid)
        rank.active[index] = (program, launch.code.start(program, *launch.arguments))
        self._step(rank, index)

    def _step(self, rank: _Rank, index: int) -> None:
        program, generator = rank.active[index]
        try:
            program.blocked_on = next(generator) or []
            if self.schedule.delivery == "at once":
                program.deliver()
        except StopIteration:
            del rank.active[index]
            rank.ended.append(program)
            if not rank.active and not rank.waiting:
                self._complete(rank)

    def _complete(self, rank: _Rank) -> None:
        """A rank's kernel is complete: what it stored is visible, and its host reads the result, and overwrites it."""
        for program in rank.ended:
            program.deliver()
            np.maximum(rank.clock, program.scalar_clock, out=rank.clock)
            np.maximum(rank.clock, program.tensor_clock, out=rank.clock)
        rank.ended = []
        host = self._hosts + rank.index
        rank.clock[host] += 1
        for region in self.memory.regions:
            if region.place.rank != rank.index:
                continue
            if region.place.name.startswith("state"):
                self._check_status(rank, region)
            if region.place.is_output and region.place.name.startswith("result"):
                self._consume(rank, region, host)

    def _check_status(self, rank: _Rank, region: Region) -> None:
        words = region.view(np.dtype(np.int64))
        status = int(words[abi.STATUS - abi.EPOCH])
        if status:
            program, peer, epoch, expected, seen = words[abi.REPORT - abi.EPOCH :][:5].tolist()
            name = _FAILURES.get(status, str(status))
            self.fail(
                "failure", None, None,
                f"rank {rank.index} ended run {epoch} with {name}: program {program}, peer {peer}, "
                f"expected {expected}, seen {seen}",
            )  # fmt: skip

    def _check_counts(self) -> None:
        """When all runs are over, every counter is where the next run expects it."""
        for region in self.memory.regions:
            for unit, growth in region.place.per_run.items():
                seen, expected = int(region.view(np.dtype(np.int64))[unit]), growth * self.runs
                if seen != expected:
                    self.fail(
                        "miscount", None, None,
                        f"after {self.runs} runs {region.describe(unit)} is {seen}, not {expected}",
                    )  # fmt: skip

    def _consume(self, rank: _Rank, region: Region, host: int) -> None:
        units = np.arange(len(region.writer))
        reader = f"the host of rank {rank.index}, after run {rank.run}, reads"
        conflict = region.read(units, host, rank.clock)
        if conflict is not None:
            writer = self.who(conflict.component)
            self.fail(
                "race", None, None,
                f"{reader} {region.describe(conflict.index)}, written by {writer}: nothing orders the two",
                other=conflict.component,
            )  # fmt: skip
        fresh = region.written_in_run == rank.run
        if not fresh.all() and not self.partial:
            unit = int(np.flatnonzero(~fresh)[0])
            last = int(region.written_in_run[unit])
            when = f"last written in run {last}" if last >= 0 else "never written"
            self.fail(
                "unwritten", None, None,
                f"{reader} {region.describe(unit)}, {when} ({int((~fresh).sum())} elements of {len(units)})",
            )  # fmt: skip
        problem = self.check(rank.index, rank.run, region) if self.check else None
        if problem:
            self.fail("wrong result", None, None, f"{reader} a wrong result: {problem}")
        if not self.partial:
            written = region.written_in_run.copy()
            region.write(units, host, rank.clock, rank.run)
            region.written_in_run = written
            region.data[:] = 0xFF  # what the next run leaves out is seen

    # -- what went wrong --------------------------------------------------------------------------------------

    def who(self, component: int) -> str:
        """A component in the author's terms."""
        if component >= self._cards:
            return f"the network card of rank {self._put_by[component - self._cards]}"
        if component >= self._hosts:
            return f"the host of rank {component - self._hosts}"
        run, rest = divmod(component // 2, self._first[-1])
        rank = max(r for r in range(self.world) if self._first[r] <= rest)
        return f"rank {rank} program {rest - self._first[rank]} (run {run})"

    def note(self, program: Program, verb: str, region: Region, units: Any, detail: str = "") -> None:
        self.events.append((self.steps, program, program.run, verb, region, units, detail))

    def fail(
        self, kind: str, program: Program | None, site: int | None, message: str, other: int | None = None
    ) -> NoReturn:
        who = ""
        location = ""
        if program is not None:
            ticket = f", ticket {program.ticket}" if program.ticket is not None else ""
            who = f"rank {program.rank} program {program.index} (run {program.run}{ticket}) "
            if site is not None:
                location = place_of(self.launches[program.rank].code.sites[site])
        involved = {program.scalars // 2} if program is not None else set()
        involved |= {other // 2} if other is not None else set()
        trace = self._trace(involved)
        raise Found(Finding(kind, who + message, location, self.seed, trace))

    def _trace(self, components: set[int]) -> tuple[str, ...]:
        """The last events of some programs, or of all."""
        found: list[str] = []
        for step, program, _, verb, region, units, detail in reversed(self.events):
            assert program is not None
            if components and program.scalars // 2 not in components:
                continue
            numbers = np.atleast_1d(units)
            if not numbers.size:
                continue
            what = region.describe(int(numbers[0])) + (f" to {int(numbers[-1])}" if numbers.size > 1 else "")
            found.append(f"step {step}: {self.who(program.scalars)} {verb} {what} {detail}".rstrip())
            if len(found) == _TRACE:
                break
        return tuple(reversed(found))

    def _deliver_all_or_deadlock(self) -> None:
        pending = [
            program
            for rank in self.ranks
            for program in [*(p for p, _ in rank.active.values()), *rank.ended]
            if program.pending
        ]
        for program in pending:
            program.deliver()
        if not pending:
            self.fail("deadlock", None, None, "every program waits:\n" + "\n".join(self._wait_graph()))

    def _wait_graph(self) -> list[str]:
        lines = []
        for rank in self.ranks:
            for index, (program, _) in rank.active.items():
                for region, unit, _ in program.blocked_on:
                    name = region.place.words.get(unit) or region.describe(unit)
                    if name == "STATUS":
                        continue
                    seen = int(region.view(np.dtype(f"int{8 * region.place.unit_bytes}"))[unit])
                    expected = region.place.per_run.get(unit)
                    needs = f", needs {(rank.run + 1) * expected}" if expected is not None else ""
                    ticket = f" ticket {program.ticket}" if program.ticket is not None else ""
                    who = f"rank {rank.index} program {index}{ticket}, run {rank.run}"
                    line = f"    {who}, waits for {name}: {seen}{needs}"
                    if line not in lines:
                        lines.append(line)
            if rank.waiting:
                lines.append(
                    f"    rank {rank.index}: {len(rank.waiting)} programs of run {rank.run} wait for one of "
                    f"{self.resident} slots"
                )
            elif not rank.active:
                lines.append(f"    rank {rank.index}: has ended run {rank.run}")
        return lines
