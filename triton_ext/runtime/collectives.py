"""The collectives that a kernel's epilogue can have: each makes a plan, by all ranks of a group together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .. import passes
from ..errors import PlanError
from ..passes import abi, dialect, nvshmem
from . import choices, flows, groups, layout
from .choices import Known, Question, Wishes
from .flows import Placement
from .groups import Group, ThreadRanks
from .memory import host_of
from .plans import Plan, PlanArguments, build

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


class _Agreement(NamedTuple):
    """What the ranks told each other: of each its tensor's shape, where it puts to, its host and its rank in the job;
    of rank 0 what the planner needs. known: as choices.known has it."""

    shapes: list[layout.Shape]
    destinations: list[int | None]
    hosts: tuple[str, ...]
    global_ranks: tuple[int, ...]
    known: Known | str
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
    hints = (choices.known(), compute_s) if group.rank == 0 else (Known(), None)
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
    flows.check(wishes.schedule or flows.DIRECT, dialect.ONE_SHOT if wishes.shots == 1 else collective)
    for each in (dtype, wire, acc):
        if each not in _DTYPES:
            raise PlanError(f"{each} cannot be sent; can be: {', '.join(str(name) for name in _DTYPES)}")
    question = _question(collective, agreed, dtype, wire, wishes, place, int(arguments.get("root", 0)))
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
    placement = Placement.of(execution.schedule, agreed.hosts)
    if len(set(placement.hosts)) > 1:
        transport = nvshmem.transport() if place.type == "cuda" else dialect.PROXY
        if placement.is_hierarchical and transport != dialect.PROXY:
            raise PlanError(f"schedule={execution.schedule!r} is for CPUs: kernels on GPUs send slices themselves")
        spec = replace(spec, transport=transport, slice_dim=_slice_dim(spec, arguments))
    return build(group, spec, placement, where, (dtype, wire, acc), place, question)


def _question(
    collective: str,
    agreed: _Agreement,
    dtype: torch.dtype,
    wire: torch.dtype,
    wishes: Wishes,
    place: torch.device,
    root: int,
) -> Question:
    """What the planner is asked. Raises PlanError if rank 0's cluster file cannot be read."""
    if isinstance(agreed.known, str):
        raise PlanError(agreed.known)
    return Question(
        collective,
        max(prod(shape) for shape in agreed.shapes) * dtype.itemsize,
        str(dtype).removeprefix("torch."),
        str(wire).removeprefix("torch."),
        agreed.hosts,
        agreed.global_ranks,
        replace(wishes, compute_s=agreed.compute_s),
        agreed.known,
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
