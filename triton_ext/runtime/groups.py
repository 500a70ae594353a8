"""Groups of ranks: processes of torch.distributed, or the virtual ranks of one process."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from ..errors import PlanError


def timeout_s() -> float:
    """How long any wait may take: TRITON_EXT_TIMEOUT_S, 30 by default."""
    text = os.environ.get("TRITON_EXT_TIMEOUT_S", "30")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise PlanError(f"TRITON_EXT_TIMEOUT_S={text!r} is not a positive number of seconds")
    return seconds


class Group(Protocol):
    """Ranks that make plans together. `exchange` is collective, with a timeout."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order."""

    @property
    def name(self) -> str:
        """What `named` finds this group by: operators take it, since their schemas have no groups."""

    def global_rank(self, rank: int) -> int:
        """A member's rank in the whole job, for messages."""


def raise_together(group: Group, problem: str | None) -> None:
    """Raise PlanError on every rank if one has a problem, with the texts of all that have. Collective."""
    if problems := [text for text in group.exchange(problem) if text]:
        raise PlanError("; ".join(problems))


class ProcessRanks:
    """A torch.distributed group. Each rank is a process."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.name = group.group_name

    def exchange(self, value: Any) -> list[Any]:
        if dist.get_backend(self.group) == "gloo":
            try:
                dist.monitored_barrier(self.group, timedelta(seconds=timeout_s()), wait_all_ranks=True)
            except RuntimeError as error:
                raise PlanError(
                    f"rank {self.rank} of {self.size}: not all ranks joined the job, or made a plan, "
                    f"within {timeout_s():g} s: {error}"
                ) from error
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def global_rank(self, rank: int) -> int:
        return dist.get_global_rank(self.group, rank)


class _Meeting:
    """Where the virtual ranks of one group meet."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.values: list[Any] = [None] * size
        self._lock = threading.Lock()
        self._subgroups: dict[tuple[int, ...], _Meeting] = {}
        self._is_aborted = False

    def subgroup(self, ranks: tuple[int, ...]) -> _Meeting:
        with self._lock:
            meeting = self._subgroups.setdefault(ranks, _Meeting(len(ranks)))
            if self._is_aborted:
                meeting.abort()
            return meeting

    def abort(self) -> None:
        """A rank has failed: whoever waits for others, or will, here or in a subgroup, fails, too."""
        with self._lock:
            self._is_aborted = True
            self.barrier.abort()
            for meeting in self._subgroups.values():
                meeting.abort()


_numbers = itertools.count()
_virtual_by_name: weakref.WeakValueDictionary[str, ThreadRanks] = weakref.WeakValueDictionary()


class ThreadRanks:
    """A virtual rank: one thread of a process that plays all ranks (tx.testing.World)."""

    def __init__(self, rank: int, ranks: Sequence[int], meeting: _Meeting, device: torch.device, host: int) -> None:
        self.rank = rank
        self.size = len(ranks)
        self.ranks = tuple(ranks)
        self.meeting = meeting
        self.device = device
        self.host = host  # ranks of different virtual hosts do not reach each other's memory
        self.name = f"virtual {next(_numbers)}"
        _virtual_by_name[self.name] = self

    @classmethod
    def world(cls, hosts: Sequence[int], device: torch.device) -> list[ThreadRanks]:
        """One rank for each entry of `hosts`, on that virtual host."""
        meeting = _Meeting(len(hosts))
        return [cls(rank, range(len(hosts)), meeting, device, host) for rank, host in enumerate(hosts)]

    def exchange(self, value: Any) -> list[Any]:
        self.meeting.values[self.rank] = value
        try:
            self.meeting.barrier.wait(timeout_s())
            values = list(self.meeting.values)
            self.meeting.barrier.wait(timeout_s())
        except threading.BrokenBarrierError:
            raise PlanError(
                f"rank {self.rank} of {self.size}: not all virtual ranks made the same plan within {timeout_s():g} s"
            ) from None
        return values

    def global_rank(self, rank: int) -> int:
        return self.ranks[rank]

    def subgroup(self, ranks: Sequence[int]) -> ThreadRanks:
        """The group of some ranks of this one; called by its members only."""
        key = tuple(ranks)
        if self.rank not in key:
            raise PlanError(f"rank {self.rank} is not in the subgroup {key}")
        ranks = [self.ranks[rank] for rank in key]
        return ThreadRanks(key.index(self.rank), ranks, self.meeting.subgroup(key), self.device, self.host)


_virtual: ContextVar[ThreadRanks | None] = ContextVar("virtual_rank", default=None)


@contextlib.contextmanager
def as_virtual_rank(ranks: ThreadRanks) -> Iterator[None]:
    """Make `ranks` the default group of this thread."""
    token = _virtual.set(ranks)
    try:
        yield
    finally:
        _virtual.reset(token)


def virtual_rank() -> ThreadRanks | None:
    """The virtual rank that this thread plays, if any."""
    return _virtual.get()


def named(name: str) -> dist.ProcessGroup | ThreadRanks:
    """The group with a name, as `resolve` takes it."""
    virtual = _virtual_by_name.get(name)
    return virtual if virtual is not None else c10d._resolve_process_group(cast(Any, name))


def resolve(group: dist.ProcessGroup | ThreadRanks | None) -> Group:
    """The group that a user means; None is the default one."""
    if isinstance(group, ThreadRanks):
        return group
    if group is None:
        if (virtual := virtual_rank()) is not None:
            return virtual
        if not dist.is_initialized():
            raise PlanError("there is no group of ranks yet: call tx.init() first")
        group = dist.group.WORLD
    if group is None or dist.get_rank(group) < 0:
        raise PlanError("this process is not a member of the group")
    return ProcessRanks(group)
