"""The schedules that there are: each builder gives the steps of a collective, or the reason why it has none.

Ranks are numbered so that those of a node follow each other (`topology` sorts them).

Sources: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations in MPICH", 2005
(ring, recursive halving and doubling, binomial tree, extras that are folded in); the direct schedules are those of
all-to-all connected GPUs; the hierarchical all_reduce reduces within each node, along rails, and gathers the same way
back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from .schedule import Schedule, Step, Steps, Transfer


class Reason(NamedTuple):
    """Why a schedule is not a candidate. Codes: not_executable, barred, not_defined, same_as, one_node,
    one_rank_per_node, too_few_tiles."""

    code: str
    text: str


@dataclass(frozen=True)
class Pattern:
    """What a schedule depends on. nodes: the node of each rank, ascending. chunks: of what is pipelined."""

    collective: str
    nodes: tuple[int, ...]
    root: int = 0
    destinations: tuple[int | None, ...] = ()
    chunks: int = 1

    @property
    def world(self) -> int:
        return len(self.nodes)

    @property
    def ranks(self) -> range:
        return range(self.world)

    @property
    def members(self) -> dict[int, list[int]]:
        """The ranks of each node."""
        found: dict[int, list[int]] = {}
        for rank, node in enumerate(self.nodes):
            found.setdefault(node, []).append(rank)
        return found


Built = tuple[int, Steps]  # number of pieces, steps
Builder = Callable[[Pattern], Built | Reason]


@lru_cache(1024)
def build(name: str, pattern: Pattern) -> Schedule | Reason:
    """The schedule of a name, or the reason why there is none."""
    built = _BUILDERS[name](pattern)
    if isinstance(built, Reason):
        return built
    pieces, steps = built
    steps = tuple(step for step in steps if step)
    return Schedule(name, pattern.collective, pattern.world, pieces, steps, pattern.root, pattern.destinations)


def is_pipelined(name: str, collective: str) -> bool:
    """Whether a schedule is cut into chunks, instead of its messages into slices."""
    return name == "tree" or (name == "ring" and collective == "broadcast")


def _not_defined(name: str, pattern: Pattern) -> Reason:
    return Reason("not_defined", f"{name} is not a schedule of {pattern.collective}")


def _step(transfers: Iterable[Transfer]) -> Step:
    """A step, in which what one rank sends another is one message."""
    merged: dict[tuple[int, int, bool], list[int]] = {}
    for source, destination, pieces, reduces in transfers:
        if source != destination:
            merged.setdefault((source, destination, reduces), []).extend(pieces)
    return tuple(Transfer(s, d, tuple(pieces), reduces) for (s, d, reduces), pieces in merged.items() if pieces)


def _scatter_reduce(ranks: range) -> Step:
    return _step(Transfer(r, d, (d,), True) for r in ranks for d in ranks)


def _gather(ranks: range) -> Step:
    return _step(Transfer(r, d, (r,)) for r in ranks for d in ranks)


def _one_shot(pattern: Pattern) -> Built | Reason:
    """Everybody sends what it has to whoever needs it."""
    world, ranks = pattern.world, pattern.ranks
    match pattern.collective:
        case "all_reduce":
            return 1, (_step(Transfer(r, d, (0,), True) for r in ranks for d in ranks),)
        case "reduce_scatter":
            return world, (_scatter_reduce(ranks),)
        case "all_gather":
            return world, (_gather(ranks),)
        case "all_to_all":
            return world**2, (_step(Transfer(r, d, (r * world + d,)) for r in ranks for d in ranks),)
        case "broadcast":
            return 1, (_step(Transfer(pattern.root, d, (0,)) for d in ranks),)
    puts = enumerate(pattern.destinations)
    return world, (_step(Transfer(s, d, (s,)) for s, d in puts if d is not None),)


def _two_shot(pattern: Pattern) -> Built | Reason:
    """Owners of parts get all there is of their part, and send it to all."""
    root, ranks = pattern.root, pattern.ranks
    match pattern.collective:
        case "all_reduce":
            return pattern.world, (_scatter_reduce(ranks), _gather(ranks))
        case "broadcast":
            scatter = _step(Transfer(root, d, (d,)) for d in ranks)
            return pattern.world, (scatter, _step(Transfer(r, d, (r,)) for r in ranks for d in ranks if d != root))
    return Reason("same_as", f"{pattern.collective} needs one shot only")


def _ring(pattern: Pattern) -> Built | Reason:
    """Every rank sends to the next one only."""
    world, ranks = pattern.world, pattern.ranks
    reduce = tuple(
        _step(Transfer(r, (r + 1) % world, ((r - k - 1) % world,), True) for r in ranks) for k in range(world - 1)
    )
    gather = tuple(_step(Transfer(r, (r + 1) % world, ((r - k) % world,)) for r in ranks) for k in range(world - 1))
    match pattern.collective:
        case "all_reduce":
            return world, reduce + gather
        case "reduce_scatter":
            return world, reduce
        case "all_gather":
            return world, gather
        case "broadcast":  # a chain, in chunks
            return pattern.chunks, tuple(
                _step(
                    Transfer((pattern.root + hop) % world, (pattern.root + hop + 1) % world, (number - hop,))
                    for hop in range(world - 1)
                    if 0 <= number - hop < pattern.chunks
                )
                for number in range(world - 1 + pattern.chunks - 1)
            )
    return _not_defined("ring", pattern)


def _halving_doubling(pattern: Pattern) -> Built | Reason:
    """Exchange halves with ranks at halved distances, then back. Above a power of two, every extra rank is folded into
    its neighbour, which sends and receives for both."""
    world = pattern.world
    core = 1 << (world.bit_length() - 1)
    extras = world - core
    # Participant i acts for its own rank and, if it has one, for the extra that follows it.
    acts_for = [(2 * i, 2 * i + 1) if i < extras else (i + extras,) for i in range(core)]
    folds = [(group[0], group[1]) for group in acts_for if len(group) == 2]
    everything = tuple(range(world))

    def halving(held: list[tuple[int, ...]]) -> Steps:
        return tuple(
            _step(
                Transfer(acts_for[i][0], acts_for[i ^ distance][0], held[other], True)
                for i in range(core)
                for other in range(core)
                if other // distance == (i ^ distance) // distance
            )
            for distance in _distances(core)
        )

    def doubling(held: list[tuple[int, ...]]) -> Steps:
        return tuple(
            _step(
                Transfer(acts_for[i][0], acts_for[i ^ distance][0], held[other])
                for i in range(core)
                for other in range(core)
                if other // distance == i // distance
            )
            for distance in reversed(_distances(core))
        )

    match pattern.collective:
        case "all_reduce":
            held: list[tuple[int, ...]] = [(i,) for i in range(core)]
            parts = tuple(range(core))
            fold = _step(Transfer(extra, rank, parts, True) for rank, extra in folds)
            unfold = _step(Transfer(rank, extra, parts) for rank, extra in folds)
            return core, (fold, *halving(held), *doubling(held), unfold)
        case "reduce_scatter":
            fold = _step(Transfer(extra, rank, everything, True) for rank, extra in folds)
            unfold = _step(Transfer(rank, extra, (extra,)) for rank, extra in folds)
            return world, (fold, *halving(list(acts_for)), unfold)
        case "all_gather":
            fold = _step(Transfer(extra, rank, (extra,)) for rank, extra in folds)
            unfold = _step(Transfer(rank, extra, tuple(p for p in everything if p != extra)) for rank, extra in folds)
            return world, (fold, *doubling(list(acts_for)), unfold)
    return _not_defined("halving_doubling", pattern)


def _distances(core: int) -> list[int]:
    """core / 2, core / 4, ..., 1."""
    return [core >> k for k in range(1, core.bit_length())]


def _tree(pattern: Pattern) -> Built | Reason:
    """A binomial tree, long distances next to the root, through which chunks follow each other."""
    if pattern.collective not in ("all_reduce", "broadcast"):
        return _not_defined("tree", pattern)
    world, chunks = pattern.world, pattern.chunks
    root = pattern.root if pattern.collective == "broadcast" else 0
    depth = (world - 1).bit_length()

    def edges(level: int) -> list[tuple[int, int]]:
        """Of parents and children."""
        distance = 1 << (depth - 1 - level)
        return [((v + root) % world, (v + distance + root) % world) for v in range(0, world - distance, 2 * distance)]

    def phase(upwards: bool) -> Steps:
        steps = []
        for number in range(depth + chunks - 1):
            transfers = []
            for turn in range(depth):
                chunk = number - turn
                if 0 <= chunk < chunks:
                    for parent, child in edges(depth - 1 - turn if upwards else turn):
                        ends = (child, parent) if upwards else (parent, child)
                        transfers.append(Transfer(*ends, (chunk,), upwards))
            steps.append(_step(transfers))
        return tuple(steps)

    return chunks, phase(False) if pattern.collective == "broadcast" else phase(True) + phase(False)


def _hierarchical(pattern: Pattern) -> Built | Reason:
    """Within each node first, so that what is for another node crosses once; there, the other way round."""
    if pattern.collective == "put":
        return _not_defined("hierarchical", pattern)
    members = pattern.members
    if len(members) == 1:
        return Reason("one_node", "all ranks are on one node")
    if len(members) == pattern.world:
        return Reason("one_rank_per_node", "no node has two ranks of the group")
    match pattern.collective:
        case "all_reduce":
            return pattern.world, (*_rails_reduce(pattern), *_rails_gather(pattern))
        case "reduce_scatter":
            return pattern.world, _rails_reduce(pattern)
        case "all_gather":
            return pattern.world, _rails_gather(pattern)
        case "all_to_all":
            return pattern.world**2, _through_gateways(pattern)
    leaders = {
        node: pattern.root if node == pattern.nodes[pattern.root] else ranks[0] for node, ranks in members.items()
    }
    across = _step(Transfer(pattern.root, leader, (0,)) for leader in leaders.values())
    within = _step(Transfer(leaders[node], rank, (0,)) for node, ranks in members.items() for rank in ranks)
    return 1, (across, within)


def _rails(pattern: Pattern) -> dict[int, list[int]]:
    """For each node and rank, who stands for the rank on that node: itself, or elsewhere the one with its place there,
    modulo the node's size."""
    members = pattern.members
    place = {rank: index for ranks in members.values() for index, rank in enumerate(ranks)}
    return {
        node: [
            rank if pattern.nodes[rank] == node else members[node][place[rank] % len(members[node])]
            for rank in pattern.ranks
        ]
        for node in members
    }


def _rails_reduce(pattern: Pattern) -> Steps:
    rails = _rails(pattern)
    within = _step(
        Transfer(rank, rails[pattern.nodes[rank]][piece], (piece,), True)
        for rank in pattern.ranks
        for piece in pattern.ranks
    )
    across = _step(Transfer(rail[piece], piece, (piece,), True) for rail in rails.values() for piece in pattern.ranks)
    return within, across


def _rails_gather(pattern: Pattern) -> Steps:
    rails = _rails(pattern)
    across = _step(Transfer(piece, rail[piece], (piece,)) for rail in rails.values() for piece in pattern.ranks)
    within = _step(
        Transfer(rails[pattern.nodes[rank]][piece], rank, (piece,)) for rank in pattern.ranks for piece in pattern.ranks
    )
    return across, within


def _through_gateways(pattern: Pattern) -> Steps:
    """An all_to_all with one stream for each pair of nodes, from and to a rank of its own where there are enough."""
    world, nodes, members = pattern.world, pattern.nodes, pattern.members
    number = {node: place for place, node in enumerate(members)}

    def gateway(node: int, other: int) -> int:
        return members[node][number[other] % len(members[node])]

    pairs = [(s, d, (s * world + d,)) for s in pattern.ranks for d in pattern.ranks]
    far = [(s, d, piece) for s, d, piece in pairs if nodes[s] != nodes[d]]
    near = [Transfer(s, d, piece) for s, d, piece in pairs if nodes[s] == nodes[d]]
    return (
        _step([*near, *(Transfer(s, gateway(nodes[s], nodes[d]), piece) for s, d, piece in far)]),
        _step(Transfer(gateway(nodes[s], nodes[d]), gateway(nodes[d], nodes[s]), piece) for s, d, piece in far),
        _step(Transfer(gateway(nodes[d], nodes[s]), d, piece) for s, d, piece in far),
    )


_BUILDERS: dict[str, Builder] = {
    "one_shot": _one_shot,
    "two_shot": _two_shot,
    "ring": _ring,
    "halving_doubling": _halving_doubling,
    "tree": _tree,
    "hierarchical": _hierarchical,
}

NAMES = tuple(_BUILDERS)
