"""Plans: what kernels run, the memory and the connections behind it, and the errors that a run ends with."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import triton.language as tl
from triton import knobs

from ..errors import CollectiveTimeout, PeerLost, PlanError
from ..passes import abi, dialect
from ..planner.schedules import Decision
from . import between_hosts, groups, layout, proxy, trace, transfers
from .choices import Question
from .flows import Placement
from .groups import Group, ProcessRanks, ThreadRanks
from .memory import MemoryRegion, SymmetricMemory
from .segment import SIGNALS, Segment
from .shipment import LEFT, Traffic
from .table import fill
from .watch import Peers, Watch, stop_watches, watch_for

_FREED = 100  # STATUS of a plan that was freed; not a kernel's code
_FORKED = 101  # likewise, of a parent's plan in a forked child
_ENDED = {_FREED: "that was freed", _FORKED: "of the process that this one was forked from"}


class PlanArguments(NamedTuple):
    """What a kernel gets of a plan: Triton flattens it."""

    table: Any
    spec: Any


class Plan(PlanArguments):
    """A collective that kernels can run: pass the plan itself as a kernel argument.

    Made by all_to_all, all_reduce, reduce_scatter, all_gather, broadcast and put of this package.
    """

    _fields = PlanArguments._fields  # Triton looks for it in the class itself
    _state: _State

    @property
    def result(self) -> torch.Tensor:
        """What this rank has after a run, at a fixed address: valid until the next run of this plan.

        Raises PlanError before the first run and after free(), and the error of a run that failed.
        """
        return self._state.result()

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor that this rank's kernel computes."""
        return self._state.layout.shapes[self._state.group.rank]

    @property
    def is_between_hosts(self) -> bool:
        """Whether slices of what this rank computes are sent to other hosts while it computes."""
        return self._state.traffic is not None

    @property
    def is_freed(self) -> bool:
        return self._state.memory is None

    def grid(self, *block_shape: int) -> tuple[int]:
        """Number of programs that cover the tensor with blocks of this shape; at least one."""
        if len(block_shape) != len(self.shape):
            raise PlanError(f"grid() got {len(block_shape)} sizes, the tensor has {len(self.shape)} dimensions")
        sizes = zip(self.shape, block_shape, strict=True)
        return (max(1, prod(-(-size // block) for size, block in sizes)),)

    def explain(self) -> Decision:
        """What this plan runs and why: the schedule chosen, the others with their times, those left out with reasons.

        str() of it is a table. Times are predicted, for a computation as long as the communication if the plan was not
        told compute_s; on figures of TRITON_EXT_CLUSTER (a file of `triton-ext probe`) or, without it, of presets.
        """
        return self._state.question.decide()

    @property
    def is_unfused_faster(self) -> bool:
        """Whether the computation and then torch.distributed's collective would take less time than this plan, as
        measured by the `triton-ext probe` that wrote TRITON_EXT_CLUSTER. False if that is not known."""
        state = self._state
        has_library = isinstance(state.group, ProcessRanks)
        is_even = len(set(state.layout.shapes)) == 1  # what was measured, and what a library takes at all
        return has_library and is_even and state.question.is_unfused_faster

    def check(self) -> None:
        """Wait for the device and raise the error of a run that failed, if one did (on a CPU, every launch does)."""
        self._state.check()

    def free(self) -> None:
        """Release the memory. Not collective; a later use raises PlanError."""
        self._state.free()


@dataclass(eq=False)
class _State:
    """The host's side of a plan."""

    collective: str
    group: Group
    layout: layout.Layout
    table: torch.Tensor
    dtype: torch.dtype
    memory: SymmetricMemory | None
    segment: Segment
    peers: Peers
    watch: Watch
    traffic: Traffic | None
    placement: Placement
    question: Question
    split_dim: int = 0
    outbox: transfers.Outbox | None = None
    programs_at_free: int = 0

    def __post_init__(self) -> None:
        # On a CPU, what kernels write is read through views that cost no torch call.
        on_cpu = self.table.device.type == "cpu"
        self.words = self.table.numpy() if on_cpu else None
        self.signals = self.segment.signals(self.memory.local).numpy() if on_cpu and self.memory else None
        self.owner = groups.virtual_rank()
        self._look_lock = threading.Lock()  # the watch looks at what free() takes away
        if self.traffic is not None:
            self._finalizer = weakref.finalize(self, proxy.drop, self.traffic, groups.timeout_s())
            self._finalizer.atexit = False

    def word(self, index: int) -> int:
        return int(self.words[index] if self.words is not None else self.table[index].item())

    def result(self) -> torch.Tensor:
        self.check()
        if self.memory is None:
            ended = _ENDED[self.word(abi.STATUS)]
            raise PlanError(f"this is a {self.collective} plan {ended}: its result is gone")
        if self.word(abi.EPOCH) == 0:
            raise PlanError(f"this {self.collective} plan has not run yet: launch a kernel with it first")
        return self.view_of_result()

    def view_of_result(self) -> torch.Tensor:
        """The result's memory, whether or not a run has filled it."""
        assert self.memory is not None
        shape = self.layout.result_shapes[self.group.rank]
        nbytes = prod(shape) * self.dtype.itemsize
        return self.memory.local[self.segment.result :][:nbytes].view(self.dtype).view(shape)

    def regions(self) -> list[MemoryRegion]:
        """This rank's signals, result and staging area, which peers may write, and its outbox."""
        assert self.memory is not None
        me, base = self.group.rank, self.memory.local.data_ptr()
        words, per_run = {}, {}
        for peer in range(self.layout.world):
            route = self.layout.routes[peer][me]
            growth = (int(self._announces_ready), route.expected, route.expected_reduced)
            for number, name in enumerate(SIGNALS):
                word = self.segment.signal(peer, name) // 8
                words[word] = f"{name} of rank {peer}"
                if number < len(growth) and (growth[number] or peer != me):  # nobody waits for the others
                    per_run[word] = growth[number]
        shape = self.layout.result_shapes[me]
        size, stage, wire_bytes = self.dtype.itemsize, self.layout.stage_elements, self.segment.wire_bytes
        return [
            MemoryRegion("signals", base, self.segment.signals_bytes, 8, (), words, per_run),
            MemoryRegion("result", base + self.segment.result, prod(shape) * size, size, shape),
            MemoryRegion("staging area", base + self.segment.stage, stage * wire_bytes, wire_bytes),
            *(self.outbox.regions(base + self.segment.outbox) if self.outbox else ()),
        ]

    def look(self) -> None:
        """Fail a run that waits for a rank that is gone: nothing more will come from it. Called by the watch."""
        if self.words is None:
            return
        with self._look_lock:
            epoch = self.word(abi.EPOCH)  # first: the run may end meanwhile, and what the next one lacks is no failure
            if self.signals is None or self.words[abi.STATUS] or not self._is_running():
                return
            lacking = [rank for rank in self._gone() if self._lacks(rank, epoch + 1)]
            if lacking:
                self.words[abi.REPORT : abi.REPORT + 5] = [-1, lacking[0], epoch, 0, 0]
                self.words[abi.STATUS] = abi.FAILED_HOST

    @property
    def _announces_ready(self) -> bool:
        """Whether ranks say that they have begun a run. The end of an all_reduce says that, for the next one."""
        return self.collective != "all_reduce"

    def _is_running(self) -> bool:
        return self.words is not None and self.words[abi.TICKETS] != self.words[abi.BASE]

    def _gone(self) -> list[int]:
        """Ranks whose process has ended, or which have left this plan."""
        left: list[int] = []
        if self.signals is not None:
            left = np.flatnonzero(self.signals[:, SIGNALS.index("LEFT")]).tolist()
        lost = self.traffic.lost if self.traffic else {}
        return sorted({*self.peers.dead(), *left, *lost} - {self.group.rank})

    def _lacks(self, rank: int, run: int) -> bool:
        """Whether a run still misses something of a rank that is gone."""
        assert self.signals is not None
        me = self.group.rank
        ready, arrived, reduced, _ = (int(word) for word in self.signals[rank])
        route = self.layout.routes[rank][me]
        unready = self._announces_ready and ready < run
        if unready or arrived < run * route.expected or reduced < run * route.expected_reduced:
            return True
        sender = self.placement.sender(rank, me) if self.layout.stage_elements else rank
        if sender == rank or (self.traffic and self.traffic.lost.get(rank) == LEFT):  # its gateway has all that it had
            return False
        arrived = int(self.signals[sender, SIGNALS.index("ARRIVED")])
        return arrived < run * self.layout.routes[sender][me].expected

    def check(self) -> None:
        """Raise what went wrong in a run, or after free()."""
        status = self.word(abi.STATUS)
        if status in _ENDED:
            if self.word(abi.BASE) != self.programs_at_free:
                raise PlanError(f"a kernel ran with a {self.collective} plan {_ENDED[status]}: it did nothing")
        elif status:
            raise self._failure(status)

    def _failure(self, status: int) -> Exception:
        program, peer, epoch, expected, seen = (self.word(abi.REPORT + i) for i in range(5))
        here = f"rank {self.group.rank} of {self.layout.world}, {self.collective}, run {epoch}"
        if status == abi.FAILED_GRID:
            return PlanError(
                f"{here}: the grid has {seen} programs, the tensor has {expected} tiles; launch with plan.grid(*block)"
            )
        if status == abi.FAILED_TILE:
            return PlanError(
                f"{here}: program {program} stored a block that starts at {seen} along dimension {self.split_dim}, its "
                f"tile starts at {expected}; a program of a {self.collective} stores its own tile"
            )
        lost = [self._describe(rank) for rank in self._gone()]
        if status == abi.FAILED_HOST:
            return PeerLost(f"{here}: lost {', '.join(lost)}; the plan cannot be used any more")
        what = {
            abi.FAILED_READY: "to begin this run",
            abi.FAILED_ARRIVAL: "to deliver its values",
            abi.FAILED_REDUCED: "to deliver reduced values",
        }[status]
        text = (
            f"{here}: program {program} waited {self.word(abi.TIMEOUT_MS) / 1000:g} s for rank {peer} {what} "
            f"(expected {expected}, seen {seen})"
        )
        if lost:
            return PeerLost(f"{text}; gone: {', '.join(lost)}")
        return CollectiveTimeout(
            f"{text}; is it slower than that, did it skip the kernel, or fail? (TRITON_EXT_TIMEOUT_S sets the limit)"
        )

    def _describe(self, rank: int) -> str:
        dead = rank in self.peers.dead()
        if self.traffic and rank in self.traffic.lost:
            state = f"on another host, {self.traffic.lost[rank]}"
        else:
            state = f"process {self.peers.pids[rank]} has ended" if dead else "it has left the plan"
        overall = self.group.global_rank(rank)
        return f"rank {rank}" + (f" (global rank {overall})" if overall != rank else "") + f" ({state})"

    def leave(self) -> None:
        """Tell the peers that this rank stores nothing more, and begin to send other hosts what is left for them."""
        if self.memory is not None and self.words is not None:
            for segment in self.memory.segments:
                if segment is not None:
                    self.segment.signals(segment)[self.group.rank, SIGNALS.index("LEFT")] = 1
        if self.traffic is not None:
            proxy.proxy().retire(self.traffic, 0 if self.word(abi.STATUS) else groups.timeout_s())

    def finish(self) -> None:
        """Behind leave(): wait until that has been sent. Warns if it has not, in time."""
        if self.traffic is None:
            return
        traffic = self._let_go()
        if not proxy.proxy().finish(traffic) and not self.word(abi.STATUS):
            warnings.warn(
                f"rank {self.group.rank} of {self.layout.world}: a plan of {self.collective} ended before peers on "
                f"other hosts took what it had for them, within {groups.timeout_s():g} s",
                stacklevel=4,
            )

    def _let_go(self) -> Traffic:
        """From now on the proxy alone keeps the traffic, and the memory that it moves."""
        traffic, self.traffic = self.traffic, None
        assert traffic is not None
        self._finalizer.detach()
        return traffic

    def free(self) -> None:
        if self.memory is None:
            return
        try:
            self.leave()
            self.finish()
        finally:  # a warning may be an error
            with self._look_lock:
                self._disarm(_FREED)

    def disown(self) -> None:
        """In a forked child: the plan stays the parent's, and its peers notice nothing of the child."""
        self._look_lock = threading.Lock()  # a thread of the parent may hold it
        if self.traffic is not None:
            self._let_go()
        if self.words is not None and self.memory is not None:  # the table on a GPU is out of a child's reach
            self._disarm(_FORKED)

    def _disarm(self, status: int) -> None:
        """Make what a kernel would still read harmless: no shape, no peers, no address."""
        self.programs_at_free = self.word(abi.BASE)
        for word in (abi.WORLD, abi.DESTINATION_END, *range(abi.SHAPE, abi.SHAPE + abi.MAX_DIMS)):
            self.table[word] = 0
        self.table[abi.STATUS] = status
        self.signals = None
        self.memory = None
        self.peers.close()


_live: weakref.WeakSet[_State] = weakref.WeakSet()
_live_lock = threading.Lock()  # to add, and to look at all: what the collector removes waits for that by itself


def _all_live() -> list[_State]:
    with _live_lock:
        return list(_live)


def _after_launch(_metadata: Any) -> None:
    """Raise, from the launch itself, what went wrong in a run (a launch on a CPU returns when the run is over)."""
    me = groups.virtual_rank()
    for state in _all_live():
        if state.words is not None and state.words[abi.STATUS] and state.owner is me:
            state.check()


def _leave_all() -> None:
    with contextlib.ExitStack() as stack:  # goes on behind a warning that is an error
        stack.callback(stop_watches)
        stack.callback(proxy.stop)
        stack.callback(proxy.finish, groups.timeout_s())
        _leave_together(_all_live(), _State.finish, stack)


def free_all(*owners: ThreadRanks | None) -> None:
    """Free the plans of virtual ranks; those of a process have the owner None."""
    with contextlib.ExitStack() as stack:
        _leave_together([state for state in _all_live() if state.owner in owners], _State.free, stack)


def _leave_together(states: list[_State], then: Callable[[_State], None], stack: contextlib.ExitStack) -> None:
    """All begin to leave, so that one deadline is that of all; `then` follows when the stack unwinds."""
    for state in states:
        stack.callback(then, state)
        state.leave()


def _disown_all() -> None:
    global _live_lock
    _live_lock = threading.Lock()  # a thread of the parent may hold it
    for state in list(_live):
        state.disown()


atexit.register(_leave_all)
os.register_at_fork(after_in_child=_disown_all)


def build(
    group: Group,
    spec: dialect.Spec,
    placement: Placement,
    where: layout.Layout,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    device: torch.device,
    question: Question,
) -> Plan:
    """Allocate a plan's memory and fill its table. dtypes: of the result, of what is sent to be reduced, of sums."""
    me, world, (dtype, wire, _) = group.rank, group.size, dtypes
    result_elements = max(prod(shape) for shape in where.result_shapes)
    segment = Segment.of(world, result_elements, where.stage_elements, dtype, wire)
    boxes = []
    if spec.transport:
        item_bytes = {abi.OF_RESULT: segment.item_bytes, abi.OF_STAGE: segment.wire_bytes}
        boxes = [transfers.Outbox.of(spec, where, rank, placement.far(rank), item_bytes) for rank in range(world)]
        segment = segment.with_outbox(max(box.nbytes for box in boxes))
        where = placement.expectations(where)
    trace.start_if_asked(group.global_rank(me), dist.get_world_size() if dist.is_initialized() else world)
    memory = SymmetricMemory(group, segment.nbytes, device)
    watch = watch_for(device)
    outbox = boxes[me] if boxes else None
    table = fill(spec, where, segment, memory, me, outbox, watch)
    words = table.numpy()
    table = table.to(device)
    pids = group.exchange(os.getpid())
    peers = _peers(group, pids, memory)
    traffic = None
    if spec.transport == dialect.PROXY:  # last, since the proxy has it then
        traffic = between_hosts.ship(group, spec, where, placement, segment, memory.segments, boxes, dtypes)
    trace.add_plan(spec.collective, words, {group.global_rank(rank): pid for rank, pid in enumerate(pids)})
    plan = Plan(table, tl.constexpr(spec.encode()))
    plan._state = _State(
        spec.collective,
        group,
        where,
        table,
        dtype,
        memory,
        segment,
        peers,
        watch,
        traffic,
        placement,
        question,
        spec.split_dim,
        outbox,
    )
    with _live_lock:
        _live.add(plan._state)
    watch.add(plan._state)
    if device.type == "cpu" and _after_launch not in knobs.runtime.launch_exit_hook.calls:
        knobs.runtime.launch_exit_hook.add(_after_launch)
    return plan


def _peers(group: Group, pids: list[int], memory: SymmetricMemory) -> Peers:
    """Collective. Raises PlanError, on every rank, where one cannot watch its peers."""
    mapped = memory.segments or [None] * group.size
    problem = None
    try:
        peers = Peers([None if segment is None else pid for pid, segment in zip(pids, mapped, strict=True)])
    except OSError as error:
        problem = f"rank {group.rank} cannot watch the processes of its peers: {error}"
    groups.raise_together(group, problem)
    return peers
