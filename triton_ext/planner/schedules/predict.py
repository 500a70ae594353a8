"""How long a schedule takes: alone, and behind the kernel that computes what it sends.

One step after the other. In a step, a link carries what is queued for it as soon as that has been computed, and the
step ends with the last byte on any link: for each link, the maximum over its messages of the time when one is ready,
plus the time that it and all that are ready later need. So do a sender's puts. A step then adds its longest latency,
the flag, and the sums of the rank that adds most. A computation is longer by what its messages take from it, and by a
flag for each step but the last: ranks that meet there are never there at the same time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from .costs import Costs
from .schedule import PieceBytes, Schedule, Step
from .topology import Topology


@dataclass(frozen=True)
class Kernel:
    """What computes a rank's tensor: so many equal tiles, one after the other, in this order (see request.ORDERS).

    slices: of what goes to a peer, which leave when they are computed.
    """

    tiles: int = 1
    tile_compute_s: float = 0.0
    slices: int = 1
    order: str = "remote_first"


def standalone_s(schedule: Schedule, topology: Topology, piece: PieceBytes, costs: Costs, slices: int = 1) -> float:
    """Of a collective whose input is all there. Seconds."""
    return fused_s(schedule, topology, piece, costs, Kernel(slices=slices))


def library_s(schedule: Schedule, topology: Topology, piece: PieceBytes, costs: Costs) -> float:
    """Of a collective library that runs this schedule."""
    step_s = costs.library_step_s
    plain = Costs(flag_s=step_s, arrive_s=step_s, sum_bytes_per_s=costs.sum_bytes_per_s)
    return costs.library_call_s + standalone_s(schedule, topology, piece, plain)


def fused_s(
    schedule: Schedule, topology: Topology, piece: PieceBytes, costs: Costs, kernel: Kernel, scale: float = 1.0
) -> float:
    """From the kernel's start until all ranks have their results. scale: of all that is communication (measured over
    predicted). Seconds."""
    flags_s = [_flag_s(step, topology, costs) for step in schedule.steps]
    if kernel.tile_compute_s:
        stolen_s = costs.stolen_s * kernel.slices * _messages_of_busiest(schedule, topology)
        longer_s = scale * (stolen_s + sum(flags_s[:-1]))
        kernel = replace(kernel, tile_compute_s=kernel.tile_compute_s + longer_s / kernel.tiles)
    compute_s = kernel.tiles * kernel.tile_compute_s
    ready_of = [_readiness(schedule, rank, kernel) for rank in range(schedule.world)]
    finished_s = 0.0
    for step, flag_s in zip(schedule.steps, flags_s, strict=True):
        # Per link and sender: when what is queued there was computed, and for how long it is busy with it.
        queues: dict[int, list[tuple[float, float]]] = {}
        added: dict[int, int] = {}
        latency_s = 0.0
        for transfer in step:
            source, destination, pieces, reduces = transfer
            route = topology.routes[source, destination]
            latency_s = max(latency_s, route.latency_s)
            nbytes = piece.of(transfer)
            if reduces:
                added[destination] = added.get(destination, 0) + nbytes
            ready = ready_of[source](pieces, finished_s)
            busy = [(link, nbytes / topology.bandwidths_bytes_per_s[link]) for link in route.links]
            is_near = topology.nodes[source] == topology.nodes[destination]
            busy.append((-1 - source, (costs.put_s if is_near else costs.send_s) * kernel.slices))
            for link, seconds in busy:
                queue = queues.setdefault(link, [])
                queue += [(at_s, seconds * scale / len(ready)) for at_s in ready]
        ended_s = max(map(_drained_s, queues.values()), default=finished_s)
        sums_s = max(added.values(), default=0) / costs.sum_bytes_per_s
        finished_s = ended_s + scale * (latency_s + flag_s + sums_s)
    return max(finished_s, compute_s)


def _flag_s(step: Step, topology: Topology, costs: Costs) -> float:
    crosses = any(topology.nodes[source] != topology.nodes[destination] for source, destination, _, _ in step)
    return max(costs.arrive_s, costs.flag_s) if crosses else costs.flag_s


def _messages_of_busiest(schedule: Schedule, topology: Topology) -> int:
    """Messages between nodes that a rank sends and gets, of the rank that has most."""
    count = [0] * schedule.world
    for step in schedule.steps:
        for source, destination, _, _ in step:
            if topology.nodes[source] != topology.nodes[destination]:
                count[source] += 1
                count[destination] += 1
    return max(count)


def _drained_s(queue: list[tuple[float, float]]) -> float:
    """When a link that serves what is ready, and never rests before that, is done."""
    now_s = 0.0
    for ready_s, seconds in sorted(queue):
        now_s = max(now_s, ready_s) + seconds
    return now_s


def _readiness(schedule: Schedule, rank: int, kernel: Kernel) -> Callable[[tuple[int, ...], float], list[float]]:
    """A function of the pieces of a message and of the time when all else that it needs is there: when each of its
    slices can leave; once, if all can at the same time."""
    own = schedule.pieces_of(rank)
    compute_s = kernel.tiles * kernel.tile_compute_s
    if not own or compute_s == 0.0:
        return lambda _, after_s: [after_s]
    piece_s = compute_s / len(own)
    blocks = _blocks(schedule, rank, own, kernel)
    place = {piece: (begin, turn, block) for begin, block in blocks for turn, piece in enumerate(block)}

    def computed_s(piece: int, fraction: float) -> float:
        """When this part of a piece is computed, in whole tiles."""
        begin, turn, block = place[piece]
        if kernel.order == "interleaved":
            slices = math.ceil(fraction * kernel.slices - 1e-9)
            done = begin + ((slices - 1) * len(block) + turn + 1) / kernel.slices
        else:
            done = begin + turn + fraction
        tiles = math.ceil(done * piece_s / kernel.tile_compute_s - 1e-9)
        return min(tiles * kernel.tile_compute_s, compute_s)

    def ready(pieces: tuple[int, ...], after_s: float) -> list[float]:
        mine = [piece for piece in pieces if piece in place]
        if not mine or after_s >= compute_s:
            return [after_s]
        times, latest_s = [], after_s
        for number in range(kernel.slices):
            # A slice may span several pieces: it is ready with the last of them.
            first, last = (bound * len(mine) / kernel.slices for bound in (number, number + 1))
            for index in range(math.floor(first + 1e-9), math.ceil(last - 1e-9)):
                latest_s = max(latest_s, computed_s(mine[index], min(last - index, 1.0)))
            times.append(latest_s)
        return times

    return ready


def _blocks(schedule: Schedule, rank: int, own: tuple[int, ...], kernel: Kernel) -> list[tuple[int, tuple[int, ...]]]:
    """The pieces in the order in which they are computed, in blocks that are needed at once, and how many come before
    each. What is sent first is computed first, peers take turns by rank, and what is not sent comes last."""
    if kernel.order == "in_order":
        return [(0, own)]
    sent, world = schedule.first_sent[rank], schedule.world
    blocks: dict[int, list[tuple[int, int]]] = {}
    for piece in own:
        step, destination = sent.get(piece, (len(schedule.steps), rank))
        blocks.setdefault(step, []).append(((destination - rank) % world, piece))
    placed, before = [], 0
    for step in sorted(blocks):
        placed.append((before, tuple(piece for _, piece in sorted(blocks[step]))))
        before += len(blocks[step])
    return placed
