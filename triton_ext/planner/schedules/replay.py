"""Execute a schedule with numpy, and find what is wrong with it."""

from __future__ import annotations

import numpy as np

from ...errors import PlanningError
from .schedule import REDUCTIONS, Schedule, Transfer

Values = list[np.ndarray]


def cut(elements: int, parts: int) -> list[tuple[int, int]]:
    """[begin, end) of each part of a tensor, as torch.chunk cuts it; the last ones may be empty."""
    size = -(-elements // parts)
    return [(min(part * size, elements), min((part + 1) * size, elements)) for part in range(parts)]


def replay(schedule: Schedule, tensors: Values) -> list[dict[int, np.ndarray]]:
    """What each rank has at the end, piece by piece. tensors: of each rank, one-dimensional, of one length.

    Raises PlanningError for a piece that is sent before it is there, that is delivered or counted twice, that is
    missing at the end, and for a transfer that makes no sense.
    """
    world, everyone = schedule.world, (1 << schedule.world) - 1
    reduces = schedule.collective in REDUCTIONS
    parts = cut(len(tensors[0]), schedule.parts_of_tensor)
    have: list[dict[int, np.ndarray]] = []
    counted: list[dict[int, int]] = []  # of a reduction: whose values a piece has in it, a bit for each rank
    for rank in range(world):
        own = schedule.pieces_of(rank)
        have.append({piece: tensors[rank][slice(*part)].copy() for piece, part in zip(own, parts, strict=False)})
        counted.append({piece: 1 << rank if reduces else everyone for piece in own})
    for number, step in enumerate(schedule.steps):
        before, counted_before = [dict(pieces) for pieces in have], [dict(pieces) for pieces in counted]
        for transfer in step:
            where = f"{schedule.name} {schedule.collective}, step {number}, {transfer}"
            _check(schedule, transfer, where)
            source, destination, pieces, adds = transfer
            for piece in pieces:
                if piece not in before[source]:
                    raise PlanningError(f"{where}: piece {piece} is not there yet")
                new, old = counted_before[source][piece], counted[destination].get(piece, 0)
                if adds and new & old:
                    raise PlanningError(f"{where}: piece {piece} would count a rank's values twice")
                if not adds and (new & old != old or new == old):
                    raise PlanningError(f"{where}: piece {piece} is delivered twice, or in place of other values")
                value = before[source][piece]
                have[destination][piece] = have[destination][piece] + value if adds else value
                counted[destination][piece] = new | old
    for rank in range(world):
        for piece in _wanted(schedule, rank):
            if counted[rank].get(piece) != everyone:
                raise PlanningError(
                    f"{schedule.name} {schedule.collective}: rank {rank} lacks piece {piece} at the end"
                )
    return [{piece: have[rank][piece] for piece in _wanted(schedule, rank)} for rank in range(world)]


def _check(schedule: Schedule, transfer: Transfer, where: str) -> None:
    ends = (transfer.source, transfer.destination)
    if not all(0 <= rank < schedule.world for rank in ends) or ends[0] == ends[1]:
        raise PlanningError(f"{where}: not two ranks of {schedule.world}")
    if not transfer.pieces or not all(0 <= piece < schedule.pieces for piece in transfer.pieces):
        raise PlanningError(f"{where}: pieces are 0 to {schedule.pieces - 1}, and a transfer has at least one")
    if transfer.reduces and schedule.collective not in REDUCTIONS:
        raise PlanningError(f"{where}: {schedule.collective} adds nothing")


def _wanted(schedule: Schedule, rank: int) -> list[int]:
    """The pieces of a rank's result, in order."""
    match schedule.collective:
        case "reduce_scatter":
            return [rank]
        case "all_to_all":
            return [source * schedule.world + rank for source in range(schedule.world)]
        case "put":
            return [source for source, destination in enumerate(schedule.destinations) if destination == rank]
    return list(range(schedule.pieces))
