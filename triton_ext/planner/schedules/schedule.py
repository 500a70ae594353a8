"""A schedule as data: steps of transfers that a runtime executes and `replay` checks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

COLLECTIVES = ("all_to_all", "all_reduce", "reduce_scatter", "all_gather", "broadcast", "put")
REDUCTIONS = ("all_reduce", "reduce_scatter")


class Transfer(NamedTuple):
    """One message: what `source` has of these pieces when the step begins goes to `destination`, which adds it to what
    it has, or takes it in its place."""

    source: int
    destination: int
    pieces: tuple[int, ...]
    reduces: bool = False


class PieceBytes(NamedTuple):
    """How large a piece is: as a value, and as a partial value on its way to be summed."""

    value: int
    partial: int

    def of(self, transfer: Transfer) -> int:
        return len(transfer.pieces) * (self.partial if transfer.reduces else self.value)


Step = tuple[Transfer, ...]
Steps = tuple[Step, ...]


@dataclass(frozen=True)
class Schedule:
    """Who sends which pieces to whom, step by step; all transfers of a step go at once.

    Pieces, by collective:
      all_reduce, broadcast     the tensor cut into `pieces` equal parts
      reduce_scatter            the tensor cut into one part per rank; rank p gets the sum of part p
      all_gather, put           piece p is rank p's tensor
      all_to_all                piece s * world + d is what rank s has for rank d
    A tensor is cut as torch.chunk does: parts of ceil(elements / parts), the last ones shorter or empty.

    root: of a broadcast. destinations: of a put, for each rank the one that it puts to, or None.
    """

    name: str
    collective: str
    world: int
    pieces: int
    steps: Steps
    root: int = 0
    destinations: tuple[int | None, ...] = ()

    @property
    def parts_of_tensor(self) -> int:
        """How many pieces a rank's tensor is cut into."""
        return {"all_gather": 1, "put": 1}.get(
            self.collective, self.world if self.collective == "all_to_all" else self.pieces
        )

    def pieces_of(self, rank: int) -> tuple[int, ...]:
        """The pieces that a rank's kernel computes, in the order in which they lie in its tensor."""
        match self.collective:
            case "all_to_all":
                return tuple(range(rank * self.world, (rank + 1) * self.world))
            case "all_gather" | "put":
                return (rank,)
            case "broadcast" if rank != self.root:
                return ()
        return tuple(range(self.pieces))

    @cached_property
    def first_sent(self) -> tuple[dict[int, tuple[int, int]], ...]:
        """For each rank: piece -> the first step that sends it, and to whom (the first of several)."""
        found: tuple[dict[int, tuple[int, int]], ...] = tuple({} for _ in range(self.world))
        for number, step in enumerate(self.steps):
            for source, destination, pieces, _ in step:
                for piece in pieces:
                    found[source].setdefault(piece, (number, destination))
        return found

    @cached_property
    def pieces_sent(self) -> tuple[int, int]:
        """By all ranks, in all steps: as values, and as partial values."""
        transfers = [transfer for step in self.steps for transfer in step]
        partial = sum(len(transfer.pieces) for transfer in transfers if transfer.reduces)
        return sum(len(transfer.pieces) for transfer in transfers) - partial, partial

    def sent_bytes(self, piece: PieceBytes) -> int:
        """By all ranks, in all steps."""
        return sum(count * size for count, size in zip(self.pieces_sent, piece, strict=True))

    def relabelled(self, ranks: tuple[int, ...]) -> Schedule:
        """The same schedule where rank r is called ranks[r]."""
        if ranks == tuple(range(self.world)):
            return self
        steps = tuple(
            tuple(
                Transfer(
                    ranks[t.source], ranks[t.destination], tuple(self._piece(p, ranks) for p in t.pieces), t.reduces
                )
                for t in step
            )
            for step in self.steps
        )
        destinations: list[int | None] = [None] * len(self.destinations)
        for rank, destination in enumerate(self.destinations):
            destinations[ranks[rank]] = None if destination is None else ranks[destination]
        return replace(self, steps=steps, root=ranks[self.root], destinations=tuple(destinations))

    def _piece(self, piece: int, ranks: tuple[int, ...]) -> int:
        if self.collective == "all_to_all":
            source, destination = divmod(piece, self.world)
            return ranks[source] * self.world + ranks[destination]
        # Parts of an all_reduce or a broadcast that has one for each rank go with the ranks, as in a reduce_scatter.
        return ranks[piece] if self.pieces == self.world else piece
