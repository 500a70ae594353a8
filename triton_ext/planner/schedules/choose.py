"""The choice of a schedule: the least exposed time, always the same one for the same question."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from ...errors import PlanningError
from ..cluster import Cluster
from .algorithms import NAMES, Pattern, Reason, build, is_pipelined
from .measured import MEASURED, interpolate
from .predict import Kernel, fused_s, library_s, standalone_s
from .request import ORDERS, UNFUSED, Measurement, Request
from .schedule import PieceBytes, Schedule
from .topology import Topology, topology_of

#: Of the time of the schedule that was chosen before: a better one has to save more than this.
HYSTERESIS = 0.05
#: Times that are closer than this part of them are the same.
_SAME = 1e-6
_CAPACITY = 4096


class Choice(NamedTuple):
    """A schedule, into how many slices per peer its messages are cut (chunks, of what is pipelined), and the order of
    tiles."""

    schedule: str
    slices: int
    order: str

    def __str__(self) -> str:
        if self.schedule == UNFUSED:
            return UNFUSED
        return f"{self.schedule}, {self.slices} slice{'s' * (self.slices > 1)}, {self.order}"


@dataclass(frozen=True)
class Candidate:
    """A choice that could be made. total_s: from the kernel's start to all results; exposed_s: of this, what the
    computation does not hide; standalone_s: the collective alone. basis: "model", or what was measured. sent_bytes: by
    all ranks together; messages: by all ranks, before they are cut into slices."""

    choice: Choice
    total_s: float
    exposed_s: float
    standalone_s: float
    basis: str
    sent_bytes: int
    steps: int
    messages: int

    @property
    def is_measured(self) -> bool:
        return self.basis.startswith(MEASURED)


class Rejected(NamedTuple):
    """A choice that cannot be made, and why. choice: its name, and its slices where that is the reason."""

    choice: str
    reason: Reason


@dataclass(frozen=True)
class Decision:
    """What was asked, what is chosen, and among what.

    candidates: all that are possible, best first. rejected: the others. why: in words. schedule: the chosen one with
    the request's ranks, for a runtime to execute; None for the unfused path.
    """

    request: Request
    chosen: Candidate
    candidates: tuple[Candidate, ...]
    rejected: tuple[Rejected, ...]
    why: str
    schedule: Schedule | None

    @property
    def choice(self) -> Choice:
        return self.chosen.choice

    def __str__(self) -> str:
        return _table(self)


def choose(
    request: Request,
    cluster: Cluster,
    *,
    measured: tuple[Measurement, ...] = (),
    previous: Choice | None = None,
    hysteresis: float = HYSTERESIS,
) -> Decision:
    """The schedule with the least exposed time, among those that the request's runtime can execute.

    previous: what was chosen before, which stays unless another one saves more than the part `hysteresis` of its time.
    Equal times: fewer bytes, then fewer steps, messages and slices decide. The result does not depend on how
    ranks are numbered, nor on the order of measured points.

    Decisions are kept (the last 4096, for the same arguments and the same cluster object). So are schedules, for the
    same collective and distribution of ranks over nodes, and the routes of a group. Raises PlanningError if nothing is
    possible, with the reasons.
    """
    if not 0 <= hysteresis < 1:
        raise PlanningError(f"hysteresis is {hysteresis}; give a part of 1")
    topology = topology_of(cluster, request.group)
    return _decide(request, topology, measured, previous, hysteresis)


@lru_cache(_CAPACITY)
def _decide(
    request: Request,
    topology: Topology,
    measured: tuple[Measurement, ...],
    previous: Choice | None,
    hysteresis: float,
) -> Decision:
    ranks = tuple(sorted(range(request.world), key=lambda rank: request.group[rank]))  # by place in the topology
    candidates: list[Candidate] = []
    rejected: list[Rejected] = []
    barred = dict(request.barred)
    for name in NAMES:
        if name in barred:
            rejected.append(Rejected(name, Reason("barred", barred[name])))
            continue
        if name not in request.executable:
            rejected.append(Rejected(name, Reason("not_executable", "not executable by the runtime")))
            continue
        for found in _variants(name, request, topology, ranks, measured):
            if isinstance(found, Candidate):
                candidates.append(found)
            else:
                rejected.append(found)
    if UNFUSED in barred:
        rejected.append(Rejected(UNFUSED, Reason("barred", barred[UNFUSED])))
    elif UNFUSED in request.executable:
        candidates.append(_unfused(request, topology, ranks, measured))
    else:
        rejected.append(Rejected(UNFUSED, Reason("not_executable", "the caller did not allow it")))
    if not candidates:
        reasons = "; ".join(f"{name}: {reason.text}" for name, reason in rejected)
        raise PlanningError(f"no schedule of {request.collective} on {request.world} ranks is possible: {reasons}")
    candidates.sort(key=_rank)
    best = min((c for c in candidates if _same(c.total_s, candidates[0].total_s)), key=_tie)
    chosen, why = _with_hysteresis(best, candidates, previous, hysteresis)
    schedule = None
    if chosen.choice.schedule != UNFUSED:
        built = _build(chosen.choice, request, topology, ranks)
        assert isinstance(built, Schedule)
        schedule = built.relabelled(ranks)
    return Decision(request, chosen, tuple(candidates), tuple(rejected), why, schedule)


_Tie = tuple[bool, int, int, int, int, int, str]


def _tie(candidate: Candidate) -> _Tie:
    name, slices, order = candidate.choice
    sent = candidate.sent_bytes, candidate.steps, candidate.messages
    return name == UNFUSED, *sent, slices, ORDERS.index(order), name


def _rank(candidate: Candidate) -> tuple[float, _Tie]:
    return candidate.total_s, _tie(candidate)


def _same(one_s: float, other_s: float) -> bool:
    return abs(one_s - other_s) <= _SAME * max(one_s, other_s)


def _with_hysteresis(
    best: Candidate, candidates: list[Candidate], previous: Choice | None, hysteresis: float
) -> tuple[Candidate, str]:
    if previous is None or previous == best.choice:
        ties = sum(_same(candidate.total_s, best.total_s) for candidate in candidates) - 1
        return best, "the least time" + (f", as {ties} other{'s' * (ties > 1)}; it sends least" if ties else "")
    for candidate in candidates:
        if candidate.choice == previous:
            saved = 1 - best.total_s / candidate.total_s if candidate.total_s else 0.0
            if saved <= hysteresis:
                return (
                    candidate,
                    f"as before: {best.choice} would save {saved:.1%}, at most {hysteresis:.1%} is too little",
                )
            return best, f"saves {saved:.1%} of what was chosen before, {previous}"
    return best, f"the least time; what was chosen before, {previous}, is not possible"


def _build(choice: Choice, request: Request, topology: Topology, ranks: tuple[int, ...]) -> Schedule | Reason:
    """In places of the topology."""
    place = {rank: index for index, rank in enumerate(ranks)}
    destinations: list[int | None] = [None] * len(request.destinations)
    for rank, destination in enumerate(request.destinations):
        destinations[place[rank]] = None if destination is None else place[destination]
    name, collective = choice.schedule, request.collective
    chunks = choice.slices if is_pipelined(name, collective) else 1
    root = place[request.root] if collective == "broadcast" else 0
    return build(name, Pattern(collective, topology.nodes, root, tuple(destinations), chunks))


def _variants(
    name: str, request: Request, topology: Topology, ranks: tuple[int, ...], measured: tuple[Measurement, ...]
) -> Iterator[Candidate | Rejected]:
    """A schedule with all numbers of slices and orders."""
    pipelined = is_pipelined(name, request.collective)
    for slices in request.slices:
        schedule = _build(Choice(name, slices, ""), request, topology, ranks)
        if isinstance(schedule, Reason):
            yield Rejected(name, schedule)
            return
        tiles = request.tiles // schedule.parts_of_tensor if not pipelined else request.tiles
        if slices > max(1, tiles):
            text = f"{slices} slices of {tiles} tiles: a slice has at least one"
            yield Rejected(f"{name}, {slices} slices", Reason("too_few_tiles", text))
            continue
        piece = request.piece(schedule.parts_of_tensor)
        alone_s = standalone_s(schedule, topology, piece, request.costs, 1 if pipelined else slices)
        found = interpolate(measured, request, name, slices)
        scale = found.standalone_s / alone_s if found.standalone_s is not None and alone_s else 1.0
        ordered = request.compute_s > 0 and schedule.parts_of_tensor > 1
        for order in request.orders if ordered else request.orders[:1]:
            kernel = Kernel(request.tiles, request.tile_compute_s, 1 if pipelined else slices, order)
            total_s = fused_s(schedule, topology, piece, request.costs, kernel, scale)
            yield Candidate(
                Choice(name, slices, order),
                total_s,
                total_s - request.compute_s,
                alone_s * scale,
                found.basis,
                schedule.sent_bytes(piece),
                len(schedule.steps),
                sum(map(len, schedule.steps)),
            )


def _unfused(
    request: Request, topology: Topology, ranks: tuple[int, ...], measured: tuple[Measurement, ...]
) -> Candidate:
    """The kernel without its collective, then a library's collective, which takes its best schedule."""
    found = interpolate(measured, request, UNFUSED, 1)
    times = []
    for name in NAMES:
        schedule = _build(Choice(name, 1, ""), request, topology, ranks)
        if isinstance(schedule, Schedule):
            nbytes = request.piece(schedule.parts_of_tensor).value
            piece = PieceBytes(nbytes, nbytes)  # a library sums in the tensor's type
            alone_s = library_s(schedule, topology, piece, request.costs)
            sent = schedule.sent_bytes(piece)
            times.append((alone_s, sent, len(schedule.steps), sum(map(len, schedule.steps))))
    alone_s, sent, steps, messages = min(times)
    if found.standalone_s is not None:
        alone_s = found.standalone_s
    compute_s = request.compute_s if request.unfused_compute_s is None else request.unfused_compute_s
    # What it takes longer than the fused kernel computes: the same yardstick for all candidates.
    total_s = compute_s + alone_s
    exposed_s = total_s - request.compute_s
    return Candidate(Choice(UNFUSED, 1, "in_order"), total_s, exposed_s, alone_s, found.basis, sent, steps, messages)


def _table(decision: Decision) -> str:
    """For people, in microseconds: the best candidate of each schedule."""
    request = decision.request
    lines = [
        f"{request.collective} of {request.tensor_bytes} B of {request.dtype} on {request.world} ranks, "
        f"{request.tiles} tiles of {request.tile_compute_s * 1e6:.3g} us",
        f"chosen: {decision.choice} ({decision.why})",
        "",
        f"{'best of each schedule':<44} {'total us':>10} {'exposed us':>10} {'alone us':>10} {'MB sent':>9}  basis",
    ]
    shown = {candidate.choice.schedule: candidate for candidate in reversed(decision.candidates)}
    shown[decision.choice.schedule] = decision.chosen
    for candidate in decision.candidates:
        if candidate is not shown[candidate.choice.schedule]:
            continue
        times = (candidate.total_s, candidate.exposed_s, candidate.standalone_s)
        mark = "*" if candidate is decision.chosen else " "
        numbers = " ".join(f"{seconds * 1e6:>10.2f}" for seconds in times)
        lines.append(f"{mark} {candidate.choice!s:<42} {numbers} {candidate.sent_bytes / 1e6:>9.3f}  {candidate.basis}")
    lines.append(f"({len(decision.candidates)} candidates)")
    for name, reason in decision.rejected:
        lines.append(f"- {name}: {reason.text} [{reason.code}]")
    return "\n".join(lines)
