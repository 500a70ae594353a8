"""Where things are in a rank's symmetric memory: the same on every rank, so that addresses need no exchange."""

from __future__ import annotations

from dataclasses import dataclass

import torch

WAITED_FOR = ("READY", "ARRIVED", "REDUCED")
SIGNALS = (*WAITED_FOR, "LEFT")  # words that each rank has at each other rank
_LINE_BYTES = 64  # between words that different ranks write


@dataclass(frozen=True)
class Segment:
    """Signals first, then the result, the staging area, and the outbox for ranks of other hosts. In bytes."""

    world: int
    result: int
    stage: int
    outbox: int
    nbytes: int
    item_bytes: int
    wire_bytes: int

    @staticmethod
    def of(world: int, result_elements: int, stage_elements: int, dtype: torch.dtype, wire: torch.dtype) -> Segment:
        """Without an outbox."""
        result = _align(world * len(SIGNALS) * _LINE_BYTES)
        stage = _align(result + result_elements * dtype.itemsize)
        outbox = _align(stage + stage_elements * wire.itemsize)
        return Segment(world, result, stage, outbox, _align(outbox, 4096), dtype.itemsize, wire.itemsize)

    def with_outbox(self, nbytes: int) -> Segment:
        sizes = (self.item_bytes, self.wire_bytes)
        return Segment(self.world, self.result, self.stage, self.outbox, _align(self.outbox + nbytes, 4096), *sizes)

    @property
    def signals_bytes(self) -> int:
        return self.world * len(SIGNALS) * _LINE_BYTES

    def signal(self, of: int, name: str) -> int:
        """Offset of a word of rank `of`."""
        return (of * len(SIGNALS) + SIGNALS.index(name)) * _LINE_BYTES

    def signals(self, memory: torch.Tensor) -> torch.Tensor:
        """int64[world, len(SIGNALS)]: the words of each rank in a rank's memory."""
        words = memory[: self.signals_bytes].view(torch.int64)
        return words.view(self.world, len(SIGNALS), _LINE_BYTES // 8)[:, :, 0]


def _align(nbytes: int, unit: int = 256) -> int:
    return -(-nbytes // unit) * unit
