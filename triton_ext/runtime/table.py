"""The table of a plan, which its kernels read: filled once, on the host."""

from __future__ import annotations

import torch

from ..backends.cpu.pool import native_code
from ..passes import abi, dialect
from . import groups, layout, transfers
from .memory import SymmetricMemory
from .segment import WAITED_FOR, Segment
from .watch import Watch


def fill(
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
