"""Plans: a collective, made once by all ranks, that kernels then run any number of times."""

from __future__ import annotations

import atexit
import os
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import triton.language as tl
from triton import knobs

from .. import passes
from ..backends.cpu.pool import native_code
from ..errors import CollectiveTimeout, PeerLost, PlanError
from ..passes import abi, dialect, nvshmem
from ..planner.cluster import Cluster
from ..planner.schedules import Decision
from . import between_hosts, choices, flows, groups, layout, proxy, trace, transfers
from .choices import Question, Wishes
from .flows import Schedule
from .groups import Group, ThreadRanks
from .memory import MemoryRegion, SymmetricMemory, host_of
from .segment import SIGNALS, WAITED_FOR, Segment
from .shipment import Traffic
from .watch import Peers, Watch, stop_watches, watch_for

_DTYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float64: "fp64",
    torch.int8: "int8",
    torch.int16: "int16",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.uint8: "uint8",
}
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
    schedule: Schedule
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
        if self.words is None or self.signals is None:
            return
        epoch = self.word(abi.EPOCH)  # first: the run may end meanwhile, and what the next one lacks is no failure
        if self.words[abi.STATUS] or not self._is_running():
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
        """Whether a run still misses something of a rank, or of the one that stands for it."""
        assert self.signals is not None
        if self.layout.stage_elements:
            rank = self.schedule.sender(rank, self.group.rank)
        ready, arrived, reduced, _ = (int(word) for word in self.signals[rank])
        route = self.layout.routes[rank][self.group.rank]
        unready = self._announces_ready and ready < run
        return unready or arrived < run * route.expected or reduced < run * route.expected_reduced

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
        """Tell the peers that this rank stores nothing more."""
        if self.memory is not None and self.words is not None:
            for segment in self.memory.segments:
                if segment is not None:
                    self.segment.signals(segment)[self.group.rank, SIGNALS.index("LEFT")] = 1
        if self.traffic is not None:
            in_order = not self.word(abi.STATUS)
            proxy.proxy().retire(self.traffic, groups.timeout_s() if in_order else 0)
            if not proxy.proxy().finish(self.traffic) and in_order:
                warnings.warn(
                    f"rank {self.group.rank} of {self.layout.world}: a plan of {self.collective} ended before peers on "
                    f"other hosts took what it had for them, within {groups.timeout_s():g} s",
                    stacklevel=3,
                )
            self.traffic = None

    def free(self) -> None:
        if self.memory is None:
            return
        self.leave()
        self._disarm(_FREED)

    def disown(self) -> None:
        """In a forked child: the plan stays the parent's, and its peers notice nothing of the child."""
        if self.traffic is not None:
            for connection in self.traffic.connections.values():
                connection.socket.close()  # or peers would not see the parent end
            self.traffic = None
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


def _after_launch(_metadata: Any) -> None:
    """Raise, from the launch itself, what went wrong in a run (a launch on a CPU returns when the run is over)."""
    me = groups.virtual_rank()
    for state in list(_live):
        if state.words is not None and state.words[abi.STATUS] and state.owner is me:
            state.check()


def _leave_all() -> None:
    for state in list(_live):
        state.leave()
    proxy.finish(groups.timeout_s())
    proxy.stop()
    stop_watches()


def free_all(owner: ThreadRanks | None) -> None:
    """Free the plans of this process, or of one virtual rank."""
    for state in list(_live):
        if state.owner is owner:
            state.free()


def _disown_all() -> None:
    for state in list(_live):
        state.disown()


atexit.register(_leave_all)
os.register_at_fork(after_in_child=_disown_all)


class _Agreement(NamedTuple):
    """What the ranks told each other: of each its tensor's shape, where it puts to, its host and its rank in the job;
    of rank 0 what the planner needs. cluster: as choices.cluster_of_file has it."""

    shapes: list[layout.Shape]
    destinations: list[int | None]
    hosts: tuple[str, ...]
    global_ranks: tuple[int, ...]
    cluster: Cluster | str | None
    compute_s: float | None


def _agree(
    group: Group,
    mine: dict[str, Any],
    shape: Sequence[int],
    free_dim: int | None,
    dst: int | None,
    compute_s: float | None,
) -> _Agreement:
    """Exchange descriptions of a plan.

    Raises PlanError, on every rank, if the ranks differ in anything but dst, compute_s, and the shape's size along
    free_dim.
    """
    place = (host_of(group), group.global_rank(group.rank))
    hints = (choices.cluster_of_file(), compute_s) if group.rank == 0 else (None, None)
    offers = group.exchange((mine, tuple(int(size) for size in shape), dst, place, hints))
    first, first_shape, *_ = offers[0]
    for rank, (other, other_shape, *_) in enumerate(offers):
        pairs = [(name, first.get(name), other.get(name)) for name in {**first, **other}]
        fixed = [tuple(n for dim, n in enumerate(s) if dim != free_dim) for s in (first_shape, other_shape)]
        if fixed[0] != fixed[1] or len(first_shape) != len(other_shape):
            pairs.append(("shape", first_shape, other_shape))
        for name, here, there in pairs:
            if here != there:
                raise PlanError(f"ranks disagree on a plan: {name} is {here} on rank 0 and {there} on rank {rank}")
    for rank, (_, other_shape, *_) in enumerate(offers):
        if not 1 <= len(other_shape) <= abi.MAX_DIMS or min(other_shape) < 0:
            raise PlanError(
                f"shape {other_shape} on rank {rank}: a plan's tensor has 1 to {abi.MAX_DIMS} dimensions, none negative"
            )
    _, shapes, destinations, places, hints_of = zip(*offers, strict=True)
    hosts, global_ranks = zip(*places, strict=True)
    return _Agreement(list(shapes), list(destinations), hosts, global_ranks, *hints_of[0])


def _dim(name: str, dim: int, ndim: int) -> int:
    if not -ndim <= dim < ndim:
        raise PlanError(f"{name}={dim} is not a dimension of a tensor with {ndim}")
    return dim % ndim


def _make(
    group: Group,
    collective: str,
    dtype: torch.dtype,
    device: torch.device | str | None,
    arguments: dict[str, Any],
    shape: Sequence[int],
    free_dim: int | None,
    lay_out: Callable[[list[layout.Shape], list[int | None]], layout.Layout],
    wishes: Wishes,
    split_dim: int = 0,
    wire_dtype: torch.dtype | None = None,
    acc_dtype: torch.dtype | None = None,
    dst: int | None = None,
) -> Plan:
    """The part that all collectives share. Collective over `group`."""
    passes.install()  # again, in case another hook took the place since
    flows.check(wishes.schedule or flows.DIRECT, dialect.ONE_SHOT if wishes.shots == 1 else collective)
    wire, acc = wire_dtype or dtype, acc_dtype or torch.promote_types(dtype, torch.float32)
    if not dtype.is_floating_point:
        acc = acc_dtype or dtype
    place = _device(group, device)
    mine = {
        "collective": collective,
        "dtype": dtype,
        "wire_dtype": wire,
        "acc_dtype": acc,
        "device": place.type,
        "number of ranks": group.size,
        "shots": wishes.shots,
        "schedule": wishes.schedule,
        "slices": wishes.slices,
        **arguments,
    }
    agreed = _agree(group, mine, shape, free_dim, dst, wishes.compute_s)
    for each in (dtype, wire, acc):
        if each not in _DTYPES:
            raise PlanError(f"{each} cannot be sent; can be: {', '.join(str(name) for name in _DTYPES)}")
    question = _question(collective, agreed, dtype, wishes, place, int(arguments.get("root", 0)))
    where = lay_out(agreed.shapes, agreed.destinations)
    execution = question.execution()
    if collective == "all_reduce" and execution.shots == 1:
        collective, where = dialect.ONE_SHOT, layout.all_reduce_one_shot(agreed.shapes)
    where = replace(where, slices=execution.slices)
    spec = dialect.Spec(
        collective,
        len(agreed.shapes[0]),
        _DTYPES[dtype],
        _DTYPES[wire],
        _DTYPES[acc],
        split_dim,
        where.alignment(16 // min(dtype.itemsize, wire.itemsize), split_dim if collective in dialect.SPLIT else -1),
    )
    schedule = Schedule.of(execution.schedule, agreed.hosts)
    if len(set(schedule.hosts)) > 1:
        transport = nvshmem.transport() if place.type == "cuda" else dialect.PROXY
        if schedule.is_hierarchical and transport != dialect.PROXY:
            raise PlanError(f"schedule={execution.schedule!r} is for CPUs: kernels on GPUs send slices themselves")
        spec = replace(spec, transport=transport, slice_dim=_slice_dim(spec, arguments))
    return _build(group, spec, schedule, where, (dtype, wire, acc), place, question)


def _question(
    collective: str, agreed: _Agreement, dtype: torch.dtype, wishes: Wishes, place: torch.device, root: int
) -> Question:
    """What the planner is asked. Raises PlanError if rank 0's cluster file cannot be read."""
    if isinstance(agreed.cluster, str):
        raise PlanError(agreed.cluster)
    return Question(
        collective,
        max(prod(shape) for shape in agreed.shapes) * dtype.itemsize,
        str(dtype).removeprefix("torch."),
        agreed.hosts,
        agreed.global_ranks,
        replace(wishes, compute_s=agreed.compute_s),
        agreed.cluster,
        place.type == "cpu",
        root,
        tuple(agreed.destinations),
    )


def _slice_dim(spec: dialect.Spec, arguments: dict[str, Any]) -> int:
    """Along which slices of what goes to a peer are contiguous in an outbox: not the last of several dimensions. Where
    an all_to_all concatenates what its ranks send, a rank computes one part after the other (a table, say).
    """
    dim = int(arguments["concat_dim"]) if spec.collective == "all_to_all" else 0
    return dim if dim < spec.ndim - 1 else 0


def _build(
    group: Group,
    spec: dialect.Spec,
    schedule: Schedule,
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
        boxes = [transfers.Outbox.of(spec, where, rank, schedule.far(rank), item_bytes) for rank in range(world)]
        segment = segment.with_outbox(max(box.nbytes for box in boxes))
        where = schedule.expectations(where)
    trace.start_if_asked(group.global_rank(me), dist.get_world_size() if dist.is_initialized() else world)
    memory = SymmetricMemory(group, segment.nbytes, device)
    watch = watch_for(device)
    outbox = boxes[me] if boxes else None
    table = _table(spec, where, segment, memory, me, outbox, watch)
    words = table.numpy()
    table = table.to(device)
    traffic = None
    if spec.transport == dialect.PROXY:
        traffic = between_hosts.ship(group, spec, where, schedule, segment, memory.segments, boxes, dtypes)
    pids = group.exchange(os.getpid())  # and all have their connections
    trace.add_plan(spec.collective, words, {group.global_rank(rank): pid for rank, pid in enumerate(pids)})
    peers = Peers(
        [
            pid if mapped is not None else None
            for pid, mapped in zip(pids, memory.segments or [None] * world, strict=True)
        ]
    )
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
        schedule,
        question,
        spec.split_dim,
        outbox,
    )
    _live.add(plan._state)
    if traffic:
        weakref.finalize(plan._state, _drop, traffic, os.getpid()).atexit = False
    watch.add(plan._state)
    if device.type == "cpu" and _after_launch not in knobs.runtime.launch_exit_hook.calls:
        knobs.runtime.launch_exit_hook.add(_after_launch)
    return plan


def _table(
    spec: dialect.Spec,
    where: layout.Layout,
    segment: Segment,
    memory: SymmetricMemory,
    me: int,
    outbox: transfers.Outbox | None,
    watch: Watch,
) -> torch.Tensor:
    """A rank's table (passes/abi.py), on the host."""
    world, shape = where.world, where.shapes[me]
    table = torch.zeros(abi.table_words(world, bool(spec.transport)), dtype=torch.int64)
    table[abi.RANK] = me
    table[abi.WORLD] = world
    table[abi.SHAPE : abi.SHAPE + len(shape)] = torch.tensor(shape)
    table[abi.SHARD] = where.shard
    table[abi.DESTINATION_BEGIN], table[abi.DESTINATION_END] = where.destinations[me]
    table[abi.CLOCK] = watch.clock_ms.data_ptr()
    table[abi.BELL] = native_code().bell
    table[abi.TIMEOUT_MS] = int(groups.timeout_s() * 1000)
    mine = memory.addresses[me]
    assert mine is not None
    for peer, address in enumerate(memory.addresses):
        there, here = where.routes[me][peer], where.routes[peer][me]
        row = table[abi.PEERS + peer * abi.PEER_WORDS :]
        if address is not None:
            row[abi.RESULT] = address + segment.result + there.origin * segment.item_bytes
            row[abi.RESULT_STRIDE : abi.RESULT_STRIDE + len(shape)] = torch.tensor(there.strides)
            if spec.reduces:
                row[abi.STAGE] = address + segment.stage + there.stage_origin * segment.wire_bytes
                row[abi.STAGE_STRIDE : abi.STAGE_STRIDE + len(shape)] = torch.tensor(there.stage_strides)
            for name in WAITED_FOR:
                row[getattr(abi, name)] = address + segment.signal(me, name)
        if spec.reduces:
            row[abi.STAGE_HERE] = mine + segment.stage + here.stage_origin * segment.wire_bytes
            row[abi.STAGE_HERE_STRIDE : abi.STAGE_HERE_STRIDE + len(shape)] = torch.tensor(here.stage_strides)
        for name in WAITED_FOR:
            row[getattr(abi, f"{name}_HERE")] = mine + segment.signal(peer, name)
        row[abi.EXPECTED] = here.expected
        row[abi.EXPECTED_REDUCED] = here.expected_reduced
        if outbox:
            transfer_row = table[abi.PEERS + world * abi.PEER_WORDS + peer * abi.TRANSFER_WORDS :]
            transfer_row[abi.PE] = -1
            if address is None:
                transfer_row[abi.PE], remote = memory.remote[peer]
                signals = {name: remote + segment.signal(me, name) for name in WAITED_FOR}
                buffers = {abi.OF_RESULT: remote + segment.result, abi.OF_STAGE: remote + segment.stage}
                transfer_row[abi.READY_THERE] = signals["READY"]
                row[abi.READY] = mine + segment.outbox + peer * 8
                outbox.fill(row, transfer_row, peer, mine + segment.outbox, buffers, signals)
    return table


def _drop(traffic: Traffic, pid: int) -> None:
    """A plan is no longer referred to: nobody waits, but what it has for other hosts goes there."""
    if os.getpid() == pid:
        proxy.proxy().retire(traffic, groups.timeout_s())


def _device(group: Group, device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    return group.device if isinstance(group, ThreadRanks) else torch.device("cpu")


GroupLike = dist.ProcessGroup | ThreadRanks | None
DeviceLike = torch.device | str | None


def all_to_all(
    shape: Sequence[int],
    dtype: torch.dtype,
    *,
    split_dim: int = 0,
    concat_dim: int = 0,
    schedule: str | None = None,
    slices: int | None = None,
    compute_s: float | None = None,
    group: GroupLike = None,
    device: DeviceLike = None,
) -> Plan:
    """Every rank computes a tensor of `shape`; its part along split_dim goes to each rank, as torch.chunk cuts it.

    The result of rank r: all ranks' r-th parts, concatenated along concat_dim. Sizes along concat_dim may differ
    among ranks if it is not split_dim. Collective; raises PlanError on every rank if the ranks disagree.

    The planner chooses what is not given (plan.explain() says why). schedule: between hosts, "direct" (each rank with
    each) or "hierarchical" (one stream for each pair of hosts). slices: messages to each peer on another host, at most.
    compute_s: how long the kernel computes; rank 0's counts.
    """
    ranks = groups.resolve(group)
    split, concat = _dim("split_dim", split_dim, len(shape)), _dim("concat_dim", concat_dim, len(shape))
    return _make(
        ranks,
        "all_to_all",
        dtype,
        device,
        {"split_dim": split, "concat_dim": concat},
        shape,
        concat if concat != split else None,
        lambda shapes, _: layout.all_to_all(shapes, split, concat),
        Wishes(None, schedule, slices, compute_s),
        split,
    )


def all_reduce(
    shape: Sequence[int],
    dtype: torch.dtype,
    *,
    acc_dtype: torch.dtype | None = None,
    wire_dtype: torch.dtype | None = None,
    shots: int | None = None,
    schedule: str | None = None,
    slices: int | None = None,
    compute_s: float | None = None,
    group: GroupLike = None,
    device: DeviceLike = None,
) -> Plan:
    """The sum of all ranks' tensors of `shape`, on every rank; bitwise the same on all, and in every run.

    shots: 2 (owners sum their parts, and send the sums to all) moves the fewest bytes; 1 (all send all to all, and sum
    it in one program at the end) waits for peers once: for small tensors. schedule: between hosts, "direct" (also if
    not given) or, in two shots, "hierarchical", which sends a host's sum once, and what it gets once
    (docs/transports.md). The planner chooses shots and slices that are not given. slices, compute_s: as in all_to_all.

    Partial values travel as wire_dtype (default: dtype) and are summed in rank order (hierarchical: those of a host
    first) in acc_dtype (default: float32,
    or dtype where that is wider or an integer). Collective; raises PlanError on every rank if the ranks disagree.
    """
    ranks = groups.resolve(group)
    split = max(range(len(shape)), key=lambda dim: shape[dim], default=0)
    return _make(
        ranks,
        "all_reduce",
        dtype,
        device,
        {},
        shape,
        None,
        lambda shapes, _: layout.all_reduce(shapes, split),
        Wishes(shots, schedule, slices, compute_s),
        split,
        wire_dtype,
        acc_dtype,
    )


def reduce_scatter(
    shape: Sequence[int],
    dtype: torch.dtype,
    *,
    split_dim: int = 0,
    acc_dtype: torch.dtype | None = None,
    wire_dtype: torch.dtype | None = None,
    schedule: str | None = None,
    slices: int | None = None,
    compute_s: float | None = None,
    group: GroupLike = None,
    device: DeviceLike = None,
) -> Plan:
    """The sum of all ranks' tensors of `shape`; each rank gets its part along split_dim, as torch.chunk cuts it.

    schedule, slices, compute_s and dtypes as in all_reduce. Collective; raises PlanError on every rank if the ranks
    disagree.
    """
    ranks = groups.resolve(group)
    split = _dim("split_dim", split_dim, len(shape))
    return _make(
        ranks,
        "reduce_scatter",
        dtype,
        device,
        {"split_dim": split},
        shape,
        None,
        lambda shapes, _: layout.reduce_scatter(shapes, split),
        Wishes(None, schedule, slices, compute_s),
        split,
        wire_dtype,
        acc_dtype,
    )


def all_gather(
    shape: Sequence[int],
    dtype: torch.dtype,
    *,
    concat_dim: int = 0,
    schedule: str | None = None,
    slices: int | None = None,
    compute_s: float | None = None,
    group: GroupLike = None,
    device: DeviceLike = None,
) -> Plan:
    """All ranks' tensors, concatenated along concat_dim (where sizes may differ), on every rank. Collective.

    schedule: between hosts, "direct", or "hierarchical" to send to each host once. slices, compute_s: as in all_to_all.
    """
    ranks = groups.resolve(group)
    concat = _dim("concat_dim", concat_dim, len(shape))
    return _make(
        ranks,
        "all_gather",
        dtype,
        device,
        {"concat_dim": concat},
        shape,
        concat,
        lambda shapes, _: layout.all_gather(shapes, concat),
        Wishes(None, schedule, slices, compute_s),
    )


def broadcast(
    shape: Sequence[int],
    dtype: torch.dtype,
    *,
    root: int = 0,
    schedule: str | None = None,
    slices: int | None = None,
    compute_s: float | None = None,
    group: GroupLike = None,
    device: DeviceLike = None,
) -> Plan:
    """The tensor of rank `root` (a rank of the group), on every rank. Every rank launches the kernel. Collective.

    schedule: between hosts, "direct", or "hierarchical" to send to each host once. slices, compute_s: as in all_to_all.
    """
    ranks = groups.resolve(group)
    if not 0 <= root < ranks.size:
        raise PlanError(f"root={root} is not a rank of a group of {ranks.size}")
    return _make(
        ranks,
        "broadcast",
        dtype,
        device,
        {"root": root},
        shape,
        None,
        lambda shapes, _: layout.broadcast(shapes, root),
        Wishes(None, schedule, slices, compute_s),
    )


def put(
    shape: Sequence[int],
    dtype: torch.dtype,
    *,
    dst: int | None,
    slices: int | None = None,
    compute_s: float | None = None,
    group: GroupLike = None,
    device: DeviceLike = None,
) -> Plan:
    """This rank's tensor goes to rank `dst` of the group, or nowhere if None. Collective: all ranks make the plan and
    launch the kernel. slices, compute_s: as in all_to_all. Raises PlanError if two ranks put to the same one.
    """
    ranks = groups.resolve(group)
    return _make(
        ranks, "put", dtype, device, {}, shape, None, _lay_out_put, Wishes(None, None, slices, compute_s), dst=dst
    )


def _lay_out_put(shapes: list[layout.Shape], destinations: list[int | None]) -> layout.Layout:
    for rank, dst in enumerate(destinations):
        if dst is not None and not 0 <= dst < len(shapes):
            raise PlanError(f"rank {rank}: dst={dst} is not a rank of a group of {len(shapes)}")
        if dst is not None and destinations.index(dst) != rank:
            raise PlanError(
                f"ranks {destinations.index(dst)} and {rank} both put to rank {dst}; use all_gather or two plans"
            )
    return layout.put(shapes, destinations)


def signature(
    collective: str, ndim: int, dtype: str = "fp32", alignment: int = 4, transport: str = ""
) -> tuple[PlanArguments, str]:
    """For compiling ahead of time: the plan's types as Triton writes them, and the value of its constant `spec`.

    The signature's entry 1 is a constexpr; give its value under the path (position of the plan, 1).
    """
    acc = "fp32" if dtype in ("fp16", "bf16") else dtype
    spec = dialect.Spec(collective, ndim, dtype, dtype, acc, 0, alignment, transport=transport)
    return PlanArguments("*i64", "constexpr"), spec.encode()
