"""How what goes to one peer lies in an outbox, is cut into slices, and is put in place at the peer: pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from ..passes import abi, dialect
from .layout import Layout, Shape, owned, strides_of
from .memory import MemoryRegion

_ALIGNMENT_BYTES = 256
# A slice keeps a network card of 400 Gbit/s busy for some 10 us, long against the cost of a request.
CARD_SLICE_BYTES = 1 << 19


@dataclass(frozen=True)
class Transfer:
    """The part of a rank's tensor that goes to one peer: indices begin[d], …, begin[d] + shape[d] - 1 per dimension.

    In the outbox it is contiguous, the slice dimension outermost, the others in order. `origin`: where logical index 0
    would be in the peer's buffer, whose strides are `strides`; all count elements. A slice is `slice_size` indices of
    the slice dimension; there are at most most_slices, if that is given, else as many as suit a network card.
    """

    begin: Shape
    shape: Shape
    origin: int
    strides: Shape
    item_bytes: int
    slice_dim: int = 0
    most_slices: int | None = None

    @property
    def order(self) -> list[int]:
        """The dimensions as the outbox has them, outermost first."""
        return [self.slice_dim, *(dim for dim in range(len(self.shape)) if dim != self.slice_dim)]

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def outbox_strides(self) -> Shape:
        packed = strides_of(tuple(self.shape[dim] for dim in self.order))
        return tuple(packed[self.order.index(dim)] for dim in range(len(self.shape)))

    @property
    def outbox_origin(self) -> int:
        """Where logical index 0 would be, from the start of the outbox."""
        return -sum(begin * stride for begin, stride in zip(self.begin, self.outbox_strides, strict=True))

    @property
    def there(self) -> int:
        """Where the first element goes, from the start of the peer's buffer."""
        return self.origin + sum(begin * stride for begin, stride in zip(self.begin, self.strides, strict=True))

    @property
    def slice_size(self) -> int:
        if self.most_slices:
            return max(1, -(-self.shape[self.slice_dim] // self.most_slices))
        row_bytes = max(self.outbox_strides[self.slice_dim] * self.item_bytes, 1)
        return max(1, min(CARD_SLICE_BYTES // row_bytes, self.shape[self.slice_dim]))

    @property
    def slice_elements(self) -> int:
        """Of every slice but the last one, which may be shorter."""
        return max(1, self.slice_size * self.outbox_strides[self.slice_dim])

    @property
    def slices(self) -> int:
        return -(-self.shape[self.slice_dim] // self.slice_size) if self.elements else 0

    @property
    def runs(self) -> tuple[int, int, int, int]:
        """What is contiguous at the peer: elements of a run; runs per group; distance of runs, and of groups."""
        shape, strides = [self.shape[dim] for dim in self.order], [self.strides[dim] for dim in self.order]
        while len(shape) > 1 and strides[-2] == shape[-1] * strides[-1]:  # the last two dimensions are as one there
            last = shape.pop()
            shape[-1] *= last
            del strides[-2]
        if len(shape) == 1:
            return self.slice_elements, 1, self.slice_elements, self.slice_elements
        if len(shape) == 2:
            return max(1, shape[1]), 1, strides[0], strides[0]
        return max(1, shape[2]), max(1, shape[1]), strides[1], strides[0]


def outgoing(
    spec: dialect.Spec, where: Layout, rank: int, peer: int, item_bytes: dict[int, int]
) -> dict[int, Transfer]:
    """What a rank sends to a peer, by its place in the plan's table: abi.OF_RESULT, abi.OF_STAGE.

    item_bytes: bytes per element, likewise.
    """
    shape, route = where.shapes[rank], where.routes[rank][peer]

    def part(owner: int) -> tuple[Shape, Shape]:
        begin, end = owned(shape[spec.split_dim], where.world, owner)
        starts = tuple(begin if dim == spec.split_dim else 0 for dim in range(len(shape)))
        return starts, tuple(end - begin if dim == spec.split_dim else size for dim, size in enumerate(shape))

    nothing = ((0,) * len(shape), (0,) * len(shape))
    if spec.collective == "all_reduce":
        result = part(rank)  # which this rank has reduced
    elif spec.reduces:
        result = nothing
    elif spec.splits:
        result = part(peer)
    else:
        first, end = where.destinations[rank]
        result = ((0,) * len(shape), shape) if first <= peer < end else nothing
    stage = nothing
    if spec.reduces:
        stage = part(peer) if spec.splits else ((0,) * len(shape), shape)

    def transfer(part: tuple[Shape, Shape], origin: int, strides: Shape, kind: int) -> Transfer:
        return Transfer(*part, origin, strides, item_bytes[kind], spec.slice_dim, where.slices)

    return {
        abi.OF_RESULT: transfer(result, route.origin, route.strides, abi.OF_RESULT),
        abi.OF_STAGE: transfer(stage, route.stage_origin, route.stage_strides or route.strides, abi.OF_STAGE),
    }


@dataclass(frozen=True)
class Outbox:
    """A rank's outbox: for each peer, and each kind of transfer, the counters of its slices, a word that counts runs
    that have left, and its elements.

    transfers: (peer, kind) -> transfer. places: likewise, the offsets of the counters and of the elements in bytes.
    """

    transfers: dict[tuple[int, int], Transfer]
    places: dict[tuple[int, int], tuple[int, int]]
    nbytes: int
    reduces: bool

    def fill(
        self,
        row: torch.Tensor,
        transfer_row: torch.Tensor,
        peer: int,
        address: int,
        buffers: dict[int, int],
        signals: dict[str, int],
    ) -> None:
        """Write the words of a peer that are about this outbox: its row of the table, and its transfers.

        address: of this outbox. buffers: of the result and the staging area of the peer, by kind; signals: of this
        rank's words at the peer; both as NVSHMEM takes them.
        """
        for kind, base, strides in (
            (abi.OF_RESULT, abi.RESULT, abi.RESULT_STRIDE),
            (abi.OF_STAGE, abi.STAGE, abi.STAGE_STRIDE),
        ):
            transfer, item = self.transfers[peer, kind], self.transfers[peer, kind].item_bytes
            counters, data = self.places[peer, kind]
            row[base] = address + data + transfer.outbox_origin * item
            row[strides : strides + len(transfer.shape)] = torch.tensor(transfer.outbox_strides)
            run, per_group, run_distance, group_distance = transfer.runs
            arrival = "REDUCED" if kind == abi.OF_RESULT and self.reduces else "ARRIVED"
            words = {
                abi.OUTBOX: address + data,
                abi.THERE: buffers[kind] + transfer.there * item,
                abi.SIGNAL_THERE: signals[arrival],
                abi.SLICE_COUNTERS: address + counters,
                abi.ELEMENTS: transfer.elements,
                abi.SLICE: transfer.slice_size,
                abi.SLICE_ELEMENTS: transfer.slice_elements,
                abi.RUN: run,
                abi.RUNS: per_group,
                abi.RUN_BYTES: run_distance * item,
                abi.GROUP_BYTES: group_distance * item,
            }
            for word, value in words.items():
                transfer_row[kind + word] = value

    def regions(self, address: int) -> list[MemoryRegion]:
        """Slice counters and elements of each transfer. address: of this outbox."""
        found = []
        for (peer, kind), (counters, data) in self.places.items():
            transfer = self.transfers[peer, kind]
            what = f"{'partial values' if kind == abi.OF_STAGE else 'values'} for rank {peer}"
            whole = transfer.slice_elements
            per_run = {n: min(whole, transfer.elements - n * whole) for n in range(transfer.slices)}
            words = {n: f"slice {n} of {what}" for n in per_run}
            found.append(
                MemoryRegion(f"slices of {what}", address + counters, 8 * transfer.slices, 8, (), words, per_run)
            )
            nbytes = transfer.elements * transfer.item_bytes
            found.append(MemoryRegion(f"outbox with {what}", address + data, nbytes, transfer.item_bytes))
        return found

    @staticmethod
    def of(spec: dialect.Spec, where: Layout, rank: int, peers: list[int], item_bytes: dict[int, int]) -> Outbox:
        """Of a rank, for peers that its stores do not reach. item_bytes as in `outgoing`."""
        transfers = {
            (peer, kind): transfer
            for peer in peers
            for kind, transfer in outgoing(spec, where, rank, peer, item_bytes).items()
        }
        # First a word per rank, where programs say to the host that a run has begun.
        places, offset = {}, _align(where.world * 8)
        for key, transfer in transfers.items():
            counters = offset
            offset = _align(counters + (transfer.slices + 1) * 8)
            places[key] = (counters, offset)
            offset = _align(offset + transfer.elements * transfer.item_bytes)
        return Outbox(transfers, places, offset, spec.reduces)


def _align(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
