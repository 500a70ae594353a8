"""The device side of the protocol, in Triton's own language: the functions whose calls the passes insert.

They are inlined by Triton's first pass, so what a target sees is standard operations only. docs/protocol.md explains
the protocol; abi.py is the layout of `table`. In all functions: `coords` is a tuple of one coordinate per dimension
(a scalar: the block's start, or a tensor of the block's shape), BLOCK the block's shape, SPLIT_DIM the dimension
that is split over owners, or -1.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from . import abi


@tl.core.builtin
def _indices(coords: Any, BLOCK: Any, _semantic: Any = None) -> tl.tuple:
    """Logical index per dimension, each a tensor that broadcasts to the block."""
    indices = []
    for dim, (coord, size) in enumerate(zip(coords, BLOCK, strict=True)):
        if not coord.type.is_block():
            lanes = tl.arange(0, tl.core._unwrap_if_constexpr(size), _semantic=_semantic)
            coord = coord.__add__(lanes, _semantic=_semantic)
            for axis in range(len(BLOCK)):
                if axis != dim:
                    coord = tl.expand_dims(coord, axis, _semantic=_semantic)
        indices.append(coord)
    return tl.tuple(indices)


@tl.core.builtin
def _are_starts(coords: Any, _semantic: Any = None) -> tl.constexpr:
    """Whether every coordinate is the start of a block."""
    return tl.constexpr(not any(coord.type.is_block() for coord in coords))


@triton.jit
def _peer_word(table, peer, word: tl.constexpr):
    return tl.load(table + (abi.PEERS + peer * abi.PEER_WORDS + word))


@triton.jit
def _counter(table, peer, word: tl.constexpr):
    return _peer_word(table, peer, word).to(tl.pointer_type(tl.int64))


@triton.jit
def _pointers(table, peer, indices, ADDRESS: tl.constexpr, STRIDE: tl.constexpr, DTYPE: tl.constexpr,
              ALIGNMENT: tl.constexpr):  # fmt: skip
    """Where the elements of a block are in a buffer of `peer`. The last dimension is contiguous in all buffers."""
    LAST: tl.constexpr = len(indices) - 1
    base = _peer_word(table, peer, ADDRESS).to(tl.pointer_type(DTYPE))
    base = tl.multiple_of(base, ALIGNMENT * (DTYPE.primitive_bitwidth // 8))
    pointers = base + indices[LAST]
    for dim in tl.static_range(LAST):
        # Not _peer_word: up to Triton 3.8, a hint on a call's result is lost when the call is inlined.
        stride = tl.multiple_of(tl.load(table + (abi.PEERS + peer * abi.PEER_WORDS + STRIDE + dim)), ALIGNMENT)
        pointers = pointers + indices[dim].to(tl.int64) * stride
    return pointers


@triton.jit
def _inside(table, indices, mask, ALIGNMENT: tl.constexpr):
    """The author's mask, and the edges of the tensor."""
    LAST: tl.constexpr = len(indices) - 1
    for dim in tl.static_range(LAST + 1):
        size = tl.multiple_of(tl.load(table + abi.SHAPE + dim), ALIGNMENT if dim == LAST else 1)
        mask = mask & (indices[dim] >= 0) & (indices[dim] < size)
    return mask


@triton.jit
def _owned(table, indices, mask, peer, SPLIT_DIM: tl.constexpr, ALIGNMENT: tl.constexpr):
    """The elements of `mask` that `peer` owns, computed for each row: a tile may have several owners."""
    if SPLIT_DIM >= 0:
        LAST: tl.constexpr = len(indices) - 1
        shard = tl.multiple_of(tl.load(table + abi.SHARD), ALIGNMENT if SPLIT_DIM == LAST else 1)
        mask = mask & (indices[SPLIT_DIM] >= peer * shard) & (indices[SPLIT_DIM] < (peer + 1) * shard)
    return mask


@triton.jit
def _destinations(table, coords, BLOCK, SPLIT_DIM: tl.constexpr):
    """The range of ranks that a tile goes to; empty for a tile outside the tensor."""
    if SPLIT_DIM >= 0:
        size = tl.load(table + abi.SHAPE + SPLIT_DIM)
        shard = tl.load(table + abi.SHARD)
        if _are_starts(coords):
            first = coords[SPLIT_DIM].to(tl.int64)
            last = first + BLOCK[SPLIT_DIM] - 1
        else:
            first = tl.min(coords[SPLIT_DIM].to(tl.int64), axis=None)
            last = tl.max(coords[SPLIT_DIM].to(tl.int64), axis=None)
        begin = tl.maximum(first, 0) // shard
        end = tl.where(size > 0, tl.minimum(last, size - 1) // shard + 1, 0)
        end = tl.where(last < 0, begin, end)
    else:
        begin = tl.load(table + abi.DESTINATION_BEGIN)
        end = tl.load(table + abi.DESTINATION_END)
    return begin.to(tl.int32), end.to(tl.int32)


@triton.jit
def _nth(table, n, begin, end):
    """The n-th rank of a range, starting behind this rank: peers are not hit all at once, and this rank is last."""
    count = end - begin
    behind = tl.load(table + abi.RANK).to(tl.int32) + 1 - begin
    return begin + ((behind + n) % count + count) % count


@triton.jit
def _overlap(start, size: tl.constexpr, low, high):
    """How many of start, …, start + size - 1 lie in low, …, high - 1."""
    return tl.maximum(tl.minimum(start + size, high) - tl.maximum(start, low), 0)


@triton.jit
def _count(table, coords, peer, BLOCK, SPLIT_DIM: tl.constexpr):
    """Elements of a tile that are for `peer`, whether or not the author masked them."""
    if _are_starts(coords):
        count = tl.full([], 1, tl.int64)
        for dim in tl.static_range(len(coords)):
            low = tl.full([], 0, tl.int64)
            high = tl.load(table + abi.SHAPE + dim)
            if dim == SPLIT_DIM:
                shard = tl.load(table + abi.SHARD)
                low = peer * shard
                high = tl.minimum(high, low + shard)
            count *= _overlap(coords[dim].to(tl.int64), BLOCK[dim], low, high)
    else:
        indices = _indices(coords, BLOCK)
        everything = tl.full(BLOCK, True, tl.int1)
        mask = _owned(table, indices, _inside(table, indices, everything, 1), peer, SPLIT_DIM, 1)
        count = tl.sum(mask.to(tl.int64), axis=None)
    return count


@triton.jit
def _is_live(table):
    """False once a wait of this rank has failed: nothing more may be stored, since a peer may still be reading."""
    return tl.load(table + abi.STATUS, volatile=True) == 0


@triton.jit
def _fail(table, code: tl.constexpr, peer, expected, seen):
    """Record the first failure of this rank; the host raises it when the kernel is complete."""
    nothing = tl.full([], 0, tl.int64)
    before = tl.atomic_cas(table + abi.STATUS, nothing, nothing + code, sem="acq_rel", scope="gpu")
    if before == 0:
        program = tl.program_id(0) + tl.num_programs(0) * (tl.program_id(1) + tl.num_programs(1) * tl.program_id(2))
        tl.store(table + abi.REPORT + 0, program.to(tl.int64))
        tl.store(table + abi.REPORT + 1, peer.to(tl.int64))
        tl.store(table + abi.REPORT + 2, tl.load(table + abi.EPOCH))
        tl.store(table + abi.REPORT + 3, expected)
        tl.store(table + abi.REPORT + 4, seen)


@triton.jit
def _look(word):
    """A word that others change, read by one thread for all: they go the same way, to the same barriers."""
    return tl.atomic_add(word, tl.full([], 0, tl.int64), sem="relaxed", scope="sys")


@triton.jit
def _wait(table, counter, expected, code: tl.constexpr, peer):
    """Acquire: return when a counter of this rank has reached `expected`, or record a failure after the timeout.

    Adding nothing is how Triton 3.6 to 3.9 all write a load with acquire at system scope: on NVIDIA it becomes one, on
    AMD one or an atomic add; atomic_cas would have device scope there up to 3.7.
    """
    nothing = tl.full([], 0, tl.int64)
    seen = tl.atomic_add(counter, nothing, sem="acquire", scope="sys")
    if seen - expected < 0:
        clock = tl.load(table + abi.CLOCK).to(tl.pointer_type(tl.int64))
        timeout_ms = tl.load(table + abi.TIMEOUT_MS)
        start_ms = _look(clock)
        waiting = tl.full([], True, tl.int1)
        while waiting:
            seen = tl.atomic_add(counter, nothing, sem="acquire", scope="sys")
            in_time = _look(clock) - start_ms <= timeout_ms
            waiting = (seen - expected < 0) & in_time & (_look(table + abi.STATUS) == 0)
        if seen - expected < 0:
            _fail(table, code, peer, expected, seen)


@triton.jit
def take_ticket(table):
    """This program's place in the order of execution, from 0, within this run."""
    base = tl.load(table + abi.BASE)
    return (tl.atomic_add(table + abi.TICKETS, 1, sem="relaxed", scope="gpu") - base).to(tl.int32)


@triton.jit
def _own_tiles(table, BLOCK, SPLIT_DIM: tl.constexpr):
    """The tiles along the split dimension that are this rank's alone: the first one, and how many."""
    size = tl.load(table + abi.SHAPE + SPLIT_DIM)
    shard = tl.load(table + abi.SHARD)
    begin = tl.minimum(tl.load(table + abi.RANK) * shard, size)
    end = tl.minimum(begin + shard, size)
    first = tl.cdiv(begin, BLOCK[SPLIT_DIM])
    behind = tl.where(end < size, end // BLOCK[SPLIT_DIM], tl.cdiv(size, BLOCK[SPLIT_DIM]))
    return first.to(tl.int32), tl.maximum(behind - first, 0).to(tl.int32)


@triton.jit
def tile_of_ticket(table, ticket, BLOCK, SPLIT_DIM: tl.constexpr, SLICE_DIM: tl.constexpr):
    """The tile of a ticket, per dimension. A ticket beyond the last tile gets a tile outside the tensor.

    Along the split dimension, tiles begin behind those that are this rank's alone and wrap around, so that these come
    last, and ranks begin with different peers. Tiles for one peer stay together; among them, the split dimension goes
    fastest: what its neighbours need of the other dimensions (a table, columns of weights) is still in the cache.
    SLICE_DIM: the dimension along which what goes to a peer is cut into slices, which goes slowest then; or -1.
    """
    NDIM: tl.constexpr = len(BLOCK)
    OUTER: tl.constexpr = SPLIT_DIM if SPLIT_DIM >= 0 else 0
    inner = tl.full([], 1, tl.int32)
    for dim in tl.static_range(NDIM):
        if dim != OUTER:
            inner *= tl.maximum(tl.cdiv(tl.load(table + abi.SHAPE + dim), BLOCK[dim]).to(tl.int32), 1)
    size = tl.load(table + abi.SHAPE + OUTER)
    tiles = tl.maximum(tl.cdiv(size, BLOCK[OUTER]).to(tl.int32), 1)
    if SPLIT_DIM >= 0:
        first, own = _own_tiles(table, BLOCK, SPLIT_DIM)
        others = tiles - own
        group = tl.minimum(tl.cdiv(tl.load(table + abi.SHARD), BLOCK[OUTER]).to(tl.int32), tl.maximum(others, 1))
        is_own = ticket >= others * inner
        begin = tl.where(is_own, others, ticket // (group * inner) * group)
        count = tl.maximum(tl.where(is_own, own, tl.minimum(group, others - begin)), 1)
        within = ticket - begin * inner
        if SLICE_DIM == SPLIT_DIM:
            rest = within % inner
            outer = (first + own + begin + within // inner) % tiles
        else:
            rest = within // count
            outer = (first + own + begin + within % count) % tiles
    elif SLICE_DIM == OUTER:
        outer = ticket // inner
        rest = ticket % inner
    else:
        outer = ticket % tiles
        rest = ticket // tiles
    outer = tl.where(ticket < tiles * inner, outer, tiles)
    # The slice dimension first, if it is one of the others; two of these at the most.
    if (SLICE_DIM >= 0) & (SLICE_DIM != OUTER):
        inner = inner // tl.maximum(tl.cdiv(tl.load(table + abi.SHAPE + SLICE_DIM), BLOCK[SLICE_DIM]).to(tl.int32), 1)
        slowest = rest // inner
        rest = rest % inner
    else:
        slowest = outer
    tile = ()
    for dim in tl.static_range(NDIM):
        if dim == OUTER:
            tile = tile + (outer,)
        elif dim == SLICE_DIM:
            tile = tile + (slowest,)
        else:
            inner = inner // tl.maximum(tl.cdiv(tl.load(table + abi.SHAPE + dim), BLOCK[dim]).to(tl.int32), 1)
            tile = tile + (rest // inner,)
            rest = rest % inner
    return tile


@triton.jit
def announce_ready(table, ticket):
    """The first program of a run tells every peer that this rank's earlier readers are done. Release."""
    if ticket == 0:
        for peer in range(0, tl.load(table + abi.WORLD).to(tl.int32)):
            tl.atomic_add(_counter(table, peer, abi.READY), 1, sem="release", scope="sys")


@triton.jit
def check_grid(table, ticket, BLOCK):
    """Record a failure if there are fewer programs than tiles: some would never be stored."""
    if ticket == 0:
        tiles = tl.full([], 1, tl.int64)
        for dim in tl.static_range(len(BLOCK)):
            tiles *= tl.cdiv(tl.load(table + abi.SHAPE + dim), BLOCK[dim])
        programs = tl.num_programs(0).to(tl.int64) * tl.num_programs(1) * tl.num_programs(2)
        if programs < tiles:
            _fail(table, abi.FAILED_GRID, tl.load(table + abi.RANK), tiles, programs)


@triton.jit
def wait_ready(table, coords, BLOCK, SPLIT_DIM: tl.constexpr):
    """Before a tile's stores: every rank that the tile goes to has begun this run."""
    begin, end = _destinations(table, coords, BLOCK, SPLIT_DIM)
    run = tl.load(table + abi.EPOCH) + 1
    for n in range(0, end - begin):
        peer = _nth(table, n, begin, end)
        _wait(table, _counter(table, peer, abi.READY_HERE), run, abi.FAILED_READY, peer)


@triton.jit
def store_tile(table, coords, value, mask, BLOCK, SPLIT_DIM: tl.constexpr, ALIGNMENT: tl.constexpr):
    """Store each row of a tile at its owner, in the owner's result."""
    begin, end = _destinations(table, coords, BLOCK, SPLIT_DIM)
    indices = _indices(coords, BLOCK)
    inside = _inside(table, indices, mask & _is_live(table), ALIGNMENT)
    for n in range(0, end - begin):
        peer = _nth(table, n, begin, end)
        pointers = _pointers(table, peer, indices, abi.RESULT, abi.RESULT_STRIDE, value.dtype, ALIGNMENT)
        tl.store(pointers, value, mask=_owned(table, indices, inside, peer, SPLIT_DIM, ALIGNMENT))


@triton.jit
def arrive(table, coords, BLOCK, SPLIT_DIM: tl.constexpr):
    """After a tile's stores: tell every rank that it went to. One barrier, then one release per owner."""
    begin, end = _destinations(table, coords, BLOCK, SPLIT_DIM)
    tl.debug_barrier()
    live = _is_live(table)  # behind the barrier: what a thread has not stored, since it saw a failure, is not counted
    for n in range(0, end - begin):
        peer = _nth(table, n, begin, end)
        count = _count(table, coords, peer, BLOCK, SPLIT_DIM)
        tl.atomic_add(_counter(table, peer, abi.ARRIVED), count, mask=live, sem="release", scope="sys")


@triton.jit
def check_tile(table, coord, tile, size: tl.constexpr):
    """Record a failure if a program reduces another tile than its own: it might wait for one that comes later."""
    own = tile * size
    if coord != own:
        _fail(table, abi.FAILED_TILE, tl.load(table + abi.RANK), own.to(tl.int64), coord.to(tl.int64))


@triton.jit
def _is_own(table, coords, BLOCK, SPLIT_DIM: tl.constexpr):
    """Whether a tile is this rank's alone. Its program is preceded by all programs that send."""
    begin, end = _destinations(table, coords, BLOCK, SPLIT_DIM)
    rank = tl.load(table + abi.RANK).to(tl.int32)
    return (begin == rank) & (end == rank + 1)


@triton.jit
def store_partial(table, coords, value, mask, BLOCK, SPLIT_DIM: tl.constexpr, ALIGNMENT: tl.constexpr):
    """Store each row of a tile in the area for this rank at its owner, which will reduce it; masked elements as zero.
    Of a tile that is this rank's alone nothing is stored: its own program reduces it.
    """
    begin, end = _destinations(table, coords, BLOCK, SPLIT_DIM)
    indices = _indices(coords, BLOCK)
    inside = _inside(table, indices, _is_live(table), ALIGNMENT)
    value = tl.where(mask, value, tl.zeros(BLOCK, value.dtype))
    if not _is_own(table, coords, BLOCK, SPLIT_DIM):
        for n in range(0, end - begin):
            peer = _nth(table, n, begin, end)
            pointers = _pointers(table, peer, indices, abi.STAGE, abi.STAGE_STRIDE, value.dtype, ALIGNMENT)
            tl.store(pointers, value, mask=_owned(table, indices, inside, peer, SPLIT_DIM, ALIGNMENT))


@triton.jit
def stage_tile(table, coords, value, mask, BLOCK, SPLIT_DIM: tl.constexpr, ALIGNMENT: tl.constexpr):
    """Store a tile in the area for this rank at every rank, this one too: all reduce it. Masked elements are zero."""
    begin, end = _destinations(table, coords, BLOCK, SPLIT_DIM)
    indices = _indices(coords, BLOCK)
    inside = _inside(table, indices, _is_live(table), ALIGNMENT)
    value = tl.where(mask, value, tl.zeros(BLOCK, value.dtype))
    for n in range(0, end - begin):
        peer = _nth(table, n, begin, end)
        pointers = _pointers(table, peer, indices, abi.STAGE, abi.STAGE_STRIDE, value.dtype, ALIGNMENT)
        tl.store(pointers, value, mask=inside)


@triton.jit
def _wait_partials(table):
    """All that the other ranks computed for this rank in this run has arrived: so they have begun it, too."""
    rank = tl.load(table + abi.RANK).to(tl.int32)
    run = tl.load(table + abi.EPOCH) + 1
    for peer in range(0, tl.load(table + abi.WORLD).to(tl.int32)):
        if peer != rank:
            expected = run * _peer_word(table, peer, abi.EXPECTED)
            _wait(table, _counter(table, peer, abi.ARRIVED_HERE), expected, abi.FAILED_ARRIVAL, peer)


@triton.jit
def _store_sum(table, indices, own, total, BLOCK, ALIGNMENT: tl.constexpr, TO_ALL: tl.constexpr):
    """Store reduced elements in the result, here or at all ranks."""
    rank = tl.load(table + abi.RANK).to(tl.int32)
    if TO_ALL:
        world = tl.load(table + abi.WORLD).to(tl.int32)
        for n in range(0, world):
            peer = _nth(table, n, 0, world)
            pointers = _pointers(table, peer, indices, abi.RESULT, abi.RESULT_STRIDE, total.dtype, ALIGNMENT)
            tl.store(pointers, total, mask=own)
    else:
        pointers = _pointers(table, rank, indices, abi.RESULT, abi.RESULT_STRIDE, total.dtype, ALIGNMENT)
        tl.store(pointers, total, mask=own)


@triton.jit
def wait_partials(table, coords, BLOCK, SPLIT_DIM: tl.constexpr):
    """Before a tile that is this rank's alone is reduced: all partial values are here."""
    if _is_own(table, coords, BLOCK, SPLIT_DIM):
        _wait_partials(table)


@triton.jit
def reduce_tile(table, coords, value, mask, BLOCK, SPLIT_DIM: tl.constexpr, ALIGNMENT: tl.constexpr,
                ACC: tl.constexpr, DTYPE: tl.constexpr, TO_ALL: tl.constexpr):  # fmt: skip
    """Sum a tile that is this rank's alone in the order of ranks, and store it in the result."""
    if _is_own(table, coords, BLOCK, SPLIT_DIM):
        rank = tl.load(table + abi.RANK).to(tl.int32)
        indices = _indices(coords, BLOCK)
        own = _inside(table, indices, _is_live(table), ALIGNMENT)
        value = tl.where(mask, value, tl.zeros(BLOCK, value.dtype))
        total = tl.zeros(BLOCK, ACC)
        for peer in range(0, tl.load(table + abi.WORLD).to(tl.int32)):
            pointers = _pointers(table, peer, indices, abi.STAGE_HERE, abi.STAGE_HERE_STRIDE, value.dtype, ALIGNMENT)
            arrived = tl.load(pointers, mask=own & (peer != rank))
            total += tl.where(peer == rank, value, arrived).to(ACC)
        _store_sum(table, indices, own, total.to(DTYPE), BLOCK, ALIGNMENT, TO_ALL)


@triton.jit
def arrive_reduced_rows(table, coords, BLOCK, SPLIT_DIM: tl.constexpr, TRANSFER: tl.constexpr):
    """Tell all ranks that the reduced rows of a tile were stored at them. One barrier, then one release each."""
    world = tl.load(table + abi.WORLD).to(tl.int32)
    count = _count(table, coords, tl.load(table + abi.RANK), BLOCK, SPLIT_DIM)
    tl.debug_barrier()
    live = _is_live(table)
    for n in range(0, world):
        counter = _counter(table, _nth(table, n, 0, world), abi.REDUCED)
        tl.atomic_add(counter, count, mask=live, sem="release", scope="sys")


@triton.jit
def arrive_reduced(table, coords, BLOCK, SPLIT_DIM: tl.constexpr, ARRIVE: tl.constexpr, TRANSFER: tl.constexpr):
    """After the reduced rows of a tile that is this rank's alone were stored at all ranks. ARRIVE: as reduce_shared."""
    if _is_own(table, coords, BLOCK, SPLIT_DIM):
        ARRIVE(table, coords, BLOCK, SPLIT_DIM, TRANSFER)


@triton.jit
def leave(table):
    """Count a program that is done with its stores; True for the last one of a run."""
    programs = tl.num_programs(0).to(tl.int64) * tl.num_programs(1) * tl.num_programs(2)
    base = tl.load(table + abi.BASE)  # before the addition: after it, the last program may be writing the next one
    done = tl.atomic_add(table + abi.DONE, 1, sem="acq_rel", scope="gpu")
    return done - base == programs - 1


@triton.jit
def _sum_staged(table, indices, mask, BLOCK, ALIGNMENT: tl.constexpr, WIRE: tl.constexpr, ACC: tl.constexpr):
    """The sum of what all ranks have left in the staging area here, in the order of ranks."""
    total = tl.zeros(BLOCK, ACC)
    for peer in range(0, tl.load(table + abi.WORLD).to(tl.int32)):
        pointers = _pointers(table, peer, indices, abi.STAGE_HERE, abi.STAGE_HERE_STRIDE, WIRE, ALIGNMENT)
        total += tl.load(pointers, mask=mask).to(ACC)
    return total


@triton.jit
def reduce_all(table, last, BLOCK, ALIGNMENT: tl.constexpr, WIRE: tl.constexpr, ACC: tl.constexpr,
               DTYPE: tl.constexpr):  # fmt: skip
    """The last program of a run sums the whole tensor, when all ranks' values are here (all_reduce in one shot)."""
    if last:
        tiles = tl.full([], 1, tl.int32)
        for dim in tl.static_range(len(BLOCK)):
            tiles *= tl.cdiv(tl.load(table + abi.SHAPE + dim), BLOCK[dim]).to(tl.int32)
        _wait_partials(table)
        for tile in range(0, tiles):
            coords = ()
            below = tiles
            rest = tile
            for dim in tl.static_range(len(BLOCK)):
                below = below // tl.cdiv(tl.load(table + abi.SHAPE + dim), BLOCK[dim]).to(tl.int32)
                coords = coords + (rest // below * BLOCK[dim],)
                rest = rest % below
            indices = _indices(coords, BLOCK)
            inside = _inside(table, indices, _is_live(table), ALIGNMENT)
            total = _sum_staged(table, indices, inside, BLOCK, ALIGNMENT, WIRE, ACC)
            _store_sum(table, indices, inside, total.to(DTYPE), BLOCK, ALIGNMENT, False)


@triton.jit
def reduce_shared(table, last, BLOCK, SPLIT_DIM: tl.constexpr, ALIGNMENT: tl.constexpr, WIRE: tl.constexpr,
                  ACC: tl.constexpr, DTYPE: tl.constexpr, TO_ALL: tl.constexpr, ARRIVE: tl.constexpr,
                  TRANSFER: tl.constexpr):  # fmt: skip
    """The last program of a run reduces this rank's rows of tiles that other ranks own rows of, too.

    There are at most two rows of such tiles, where this rank's part begins and where it ends. Their own programs
    cannot wait: other ranks' values for this rank may be in tiles that come later.
    ARRIVE: arrive_reduced_rows, or that of another transport, which takes TRANSFER.
    """
    size = tl.load(table + abi.SHAPE + SPLIT_DIM)
    shard = tl.load(table + abi.SHARD)
    own_begin = tl.minimum(tl.load(table + abi.RANK) * shard, size)
    own_end = tl.minimum(own_begin + shard, size)
    if last & (own_begin < own_end):
        SIZE: tl.constexpr = BLOCK[SPLIT_DIM]
        inner = tl.full([], 1, tl.int32)
        for dim in tl.static_range(len(BLOCK)):
            if dim != SPLIT_DIM:
                inner *= tl.cdiv(tl.load(table + abi.SHAPE + dim), BLOCK[dim]).to(tl.int32)
        first = (own_begin // SIZE).to(tl.int32)
        final = ((own_end - 1) // SIZE).to(tl.int32)
        _wait_partials(table)
        for outer in range(first, final + 1, tl.maximum(final - first, 1)):
            begin = tl.cast(outer, tl.int64) * SIZE
            if (begin < own_begin) | (tl.minimum(begin + SIZE, size) > own_end):
                for rest in range(0, inner):
                    coords = ()
                    below = inner
                    for dim in tl.static_range(len(BLOCK)):
                        if dim == SPLIT_DIM:
                            coords = coords + (outer * SIZE,)
                        else:
                            below = below // tl.cdiv(tl.load(table + abi.SHAPE + dim), BLOCK[dim]).to(tl.int32)
                            coords = coords + (rest // below * BLOCK[dim],)
                            rest = rest % below
                    indices = _indices(coords, BLOCK)
                    inside = _inside(table, indices, _is_live(table), ALIGNMENT)
                    own = _owned(table, indices, inside, tl.load(table + abi.RANK), SPLIT_DIM, ALIGNMENT)
                    total = _sum_staged(table, indices, own, BLOCK, ALIGNMENT, WIRE, ACC)
                    _store_sum(table, indices, own, total.to(DTYPE), BLOCK, ALIGNMENT, TO_ALL)
                    if TO_ALL:
                        ARRIVE(table, coords, BLOCK, SPLIT_DIM, TRANSFER)


@triton.jit
def finish(table, last, ARRIVALS: tl.constexpr):
    """The tail: the last program of a run waits until everything for this rank has arrived, then ends the run.

    ARRIVALS: what is left to arrive when all programs are done: "stored" elements, "reduced" ones (all_reduce), or
    "none" (reduce_scatter, whose programs have waited for all that they reduced).
    """
    if last:
        run = tl.load(table + abi.EPOCH) + 1
        if ARRIVALS != "none":
            for peer in range(0, tl.load(table + abi.WORLD).to(tl.int32)):
                if ARRIVALS == "reduced":
                    expected = run * _peer_word(table, peer, abi.EXPECTED_REDUCED)
                    _wait(table, _counter(table, peer, abi.REDUCED_HERE), expected, abi.FAILED_REDUCED, peer)
                else:
                    expected = run * _peer_word(table, peer, abi.EXPECTED)
                    _wait(table, _counter(table, peer, abi.ARRIVED_HERE), expected, abi.FAILED_ARRIVAL, peer)
        programs = tl.num_programs(0).to(tl.int64) * tl.num_programs(1) * tl.num_programs(2)
        # In this order: a host that finds EPOCH at this run must not take it for the next one in progress.
        tl.store(table + abi.BASE, tl.load(table + abi.BASE) + programs)
        if _is_live(table):
            tl.store(table + abi.EPOCH, run)
