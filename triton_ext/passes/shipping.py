"""The protocol with peers that stores do not reach: what differs from protocol.py, for plans that have such peers.

Tiles for such a peer are stored in an outbox, and counted there per slice. The program that completes a slice sends it
with NVSHMEM; where a thread of the host sends (dialect.PROXY), it looks at the counters. Waits and the order of runs
are those of the protocol; docs/transports.md says why the outbox may be written again.

TRANSFER is the tuple (slice dimension, first word of the transfer in a peer's transfers, bytes per element, whether
programs send).
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import abi, nvshmem
from .protocol import (
    _are_starts,
    _count,
    _counter,
    _destinations,
    _indices,
    _inside,
    _is_live,
    _is_own,
    _look,
    _nth,
    _overlap,
    _owned,
    _peer_word,
    _wait_partials,
)


@triton.jit
def _transfer_word(table, peer, word: tl.constexpr):
    rows = tl.load(table + abi.WORLD) * abi.PEER_WORDS
    return tl.load(table + abi.PEERS + rows + peer * abi.TRANSFER_WORDS + word)


@triton.jit
def announce_ready(table, ticket):
    """protocol.announce_ready."""
    if ticket == 0:
        for peer in range(0, tl.load(table + abi.WORLD).to(tl.int32)):
            pe = _transfer_word(table, peer, abi.PE).to(tl.int32)
            if pe < 0:
                tl.atomic_add(_counter(table, peer, abi.READY), 1, sem="release", scope="sys")
            else:
                nvshmem.add_signal(_transfer_word(table, peer, abi.READY_THERE), tl.full([], 1, tl.int64), pe)


@triton.jit
def ring(table, ticket):
    """Behind announce_ready, where a thread of the host tells: wake it. A CPU does that for programs that end or wait,
    so this one waits until it was done.
    """
    if ticket == 0:
        bell = tl.load(table + abi.BELL).to(tl.pointer_type(tl.int64))
        tl.atomic_xchg(bell, 1, sem="release", scope="sys")
        rings = tl.full([], True, tl.int1)
        rounds = tl.full([], 0, tl.int32)
        while rings:  # the first round wakes it; others may ring, too, so the number of rounds has an end
            rounds += 1
            rings = (_look(bell) != 0) & (rounds < 1000)


@triton.jit
def _part(table, coords, owner, low, high, BLOCK, SPLIT_DIM: tl.constexpr, SLICE_DIM: tl.constexpr):
    """Elements of a tile that `owner` owns, with indices low, …, high - 1 along the slice dimension."""
    if _are_starts(coords):
        count = tl.full([], 1, tl.int64)
        for dim in tl.static_range(len(coords)):
            begin = tl.full([], 0, tl.int64)
            end = tl.load(table + abi.SHAPE + dim)
            if dim == SPLIT_DIM:
                shard = tl.load(table + abi.SHARD)
                begin = owner * shard
                end = tl.minimum(end, begin + shard)
            if dim == SLICE_DIM:
                begin = tl.maximum(begin, low)
                end = tl.minimum(end, high)
            count *= _overlap(coords[dim].to(tl.int64), BLOCK[dim], begin, end)
    else:
        indices = _indices(coords, BLOCK)
        everything = tl.full(BLOCK, True, tl.int1)
        mask = _owned(table, indices, _inside(table, indices, everything, 1), owner, SPLIT_DIM, 1)
        mask = mask & (indices[SLICE_DIM] >= low) & (indices[SLICE_DIM] < high)
        count = tl.sum(mask.to(tl.int64), axis=None)
    return count


@triton.jit
def _send(table, peer, number, pe, TRANSFER: tl.constexpr):
    """Start to copy a slice to its peer, whose counter grows by each part's elements when the part is there."""
    WORDS: tl.constexpr = TRANSFER[1]
    BYTES: tl.constexpr = TRANSFER[2]
    source = _transfer_word(table, peer, WORDS + abi.OUTBOX)
    there = _transfer_word(table, peer, WORDS + abi.THERE)
    signal = _transfer_word(table, peer, WORDS + abi.SIGNAL_THERE)
    length = _transfer_word(table, peer, WORDS + abi.RUN)
    runs = _transfer_word(table, peer, WORDS + abi.RUNS)
    at = number * _transfer_word(table, peer, WORDS + abi.SLICE_ELEMENTS)
    end = tl.minimum(
        at + _transfer_word(table, peer, WORDS + abi.SLICE_ELEMENTS),
        _transfer_word(table, peer, WORDS + abi.ELEMENTS),
    )
    while at < end:
        count = tl.minimum(length, end - at)
        run = at // length
        offset = run // runs * _transfer_word(table, peer, WORDS + abi.GROUP_BYTES)
        offset += run % runs * _transfer_word(table, peer, WORDS + abi.RUN_BYTES)
        nvshmem.put_signal(there + offset, source + at * BYTES, count * BYTES, signal, count, pe)
        at += count


@triton.jit
def _ship(table, coords, peer, owner, pe, live, BLOCK, SPLIT_DIM: tl.constexpr, TRANSFER: tl.constexpr):
    """Count a tile of the outbox for `peer` in the slices that it touches, and send those that are complete with it.

    owner: of the rows that go to the peer. The addition to a slice's counter releases this tile and acquires those of
    other programs, at system scope: a network card reads them.
    """
    SLICE_DIM: tl.constexpr = TRANSFER[0]
    WORDS: tl.constexpr = TRANSFER[1]
    run = tl.load(table + abi.EPOCH) + 1
    size = _transfer_word(table, peer, WORDS + abi.SLICE)
    elements = _transfer_word(table, peer, WORDS + abi.ELEMENTS)
    slice_elements = _transfer_word(table, peer, WORDS + abi.SLICE_ELEMENTS)
    counters = _transfer_word(table, peer, WORDS + abi.SLICE_COUNTERS).to(tl.pointer_type(tl.int64))
    begin = owner * tl.load(table + abi.SHARD) if SPLIT_DIM == SLICE_DIM else tl.full([], 0, tl.int64)
    if _are_starts(coords):
        first = coords[SLICE_DIM].to(tl.int64)
        last = first + BLOCK[SLICE_DIM] - 1
    else:
        first = tl.min(coords[SLICE_DIM].to(tl.int64), axis=None)
        last = tl.max(coords[SLICE_DIM].to(tl.int64), axis=None)
    slices = tl.cdiv(elements, slice_elements)
    before = tl.maximum(first - begin, 0) // size
    behind = tl.minimum(tl.maximum(last - begin + size, 0) // size, slices)
    for number in range(before, behind):
        low = begin + number * size
        count = _part(table, coords, owner, low, low + size, BLOCK, SPLIT_DIM, SLICE_DIM)
        stored = tl.atomic_add(counters + number, count, mask=live & (count > 0), sem="acq_rel", scope="sys")
        whole = run * tl.minimum(slice_elements, elements - number * slice_elements)
        if live & (count > 0) & (stored + count == whole):
            if TRANSFER[3]:
                _send(table, peer, number, pe, TRANSFER)
            else:
                tl.atomic_xchg(tl.load(table + abi.BELL).to(tl.pointer_type(tl.int64)), 1, sem="release", scope="sys")


@triton.jit
def arrive(table, coords, BLOCK, SPLIT_DIM: tl.constexpr, TRANSFER: tl.constexpr):
    """protocol.arrive."""
    begin, end = _destinations(table, coords, BLOCK, SPLIT_DIM)
    tl.debug_barrier()
    live = _is_live(table)
    for n in range(0, end - begin):
        peer = _nth(table, n, begin, end)
        pe = _transfer_word(table, peer, abi.PE).to(tl.int32)
        if pe < 0:
            count = _count(table, coords, peer, BLOCK, SPLIT_DIM)
            tl.atomic_add(_counter(table, peer, abi.ARRIVED), count, mask=live, sem="release", scope="sys")
        else:
            _ship(table, coords, peer, peer, pe, live, BLOCK, SPLIT_DIM, TRANSFER)


@triton.jit
def _receive(table, run, HERE: tl.constexpr, EXPECTED: tl.constexpr):
    """After waits for counters of peers, for a run: NVSHMEM makes sure that what they count is in memory."""
    live = _is_live(table)
    for peer in range(0, tl.load(table + abi.WORLD).to(tl.int32)):
        if live & (_transfer_word(table, peer, abi.PE) >= 0):
            nvshmem.receive(_peer_word(table, peer, HERE), run * _peer_word(table, peer, EXPECTED))
    tl.debug_barrier()


@triton.jit
def receive_partials(table, coords, BLOCK, SPLIT_DIM: tl.constexpr):
    """Behind protocol.wait_partials."""
    if _is_own(table, coords, BLOCK, SPLIT_DIM):
        _receive(table, tl.load(table + abi.EPOCH) + 1, abi.ARRIVED_HERE, abi.EXPECTED)


@triton.jit
def receive_shared(table, last):
    """Before protocol.reduce_shared, which waits for the same values."""
    if last:
        _wait_partials(table)
        _receive(table, tl.load(table + abi.EPOCH) + 1, abi.ARRIVED_HERE, abi.EXPECTED)


@triton.jit
def receive_last(table, last, HERE: tl.constexpr, EXPECTED: tl.constexpr):
    """Behind protocol.finish, which has ended the run."""
    if last:
        _receive(table, tl.load(table + abi.EPOCH), HERE, EXPECTED)


@triton.jit
def arrive_reduced_rows(table, coords, BLOCK, SPLIT_DIM: tl.constexpr, TRANSFER: tl.constexpr):
    """protocol.arrive_reduced_rows."""
    world = tl.load(table + abi.WORLD).to(tl.int32)
    rank = tl.load(table + abi.RANK).to(tl.int32)
    count = _count(table, coords, rank, BLOCK, SPLIT_DIM)
    tl.debug_barrier()
    live = _is_live(table)
    for n in range(0, world):
        peer = _nth(table, n, 0, world)
        pe = _transfer_word(table, peer, abi.PE).to(tl.int32)
        if pe < 0:
            tl.atomic_add(_counter(table, peer, abi.REDUCED), count, mask=live, sem="release", scope="sys")
        else:
            _ship(table, coords, peer, rank, pe, live, BLOCK, SPLIT_DIM, TRANSFER)
