"""What a kernel sends of an outbox arrives where a store would have put it."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from triton_ext.runtime import layout, transfers
from triton_ext.runtime.transfers import Transfer


@st.composite
def parts(draw):
    """A part of a tensor, and the shape of the buffer that it goes to; the part's place there is inside."""
    ndim = draw(st.integers(1, 3))
    sizes = st.lists(st.integers(1, 5), min_size=ndim, max_size=ndim)
    shape, begin, before, behind = (tuple(draw(sizes)) for _ in range(4))
    flat = [draw(st.booleans()) for _ in range(ndim)]  # dimensions that the part fills
    place = tuple(0 if f else b for f, b in zip(flat, before, strict=True))
    buffer = tuple(s if f else s + b + e for f, s, b, e in zip(flat, shape, before, behind, strict=True))
    strides = layout.strides_of(buffer)
    origin = sum((p - b) * s for p, b, s in zip(place, begin, strides, strict=True))
    item_bytes = draw(st.sampled_from([1 << 16, 1 << 18, 1 << 20]))  # so that a slice has a few elements
    slice_dim = draw(st.integers(0, max(ndim - 2, 0)))  # the last dimension is contiguous in all buffers
    return Transfer(begin, shape, origin, strides, item_bytes, slice_dim), buffer


@given(parts())
def test_runs_put_every_element_in_its_place_once(case):
    part, buffer = case
    outbox, there = np.full(part.elements, -1), np.full(buffer, -1).reshape(-1)
    stored = there.copy()
    for number, index in enumerate(itertools.product(*map(range, part.shape))):
        logical = [b + i for b, i in zip(part.begin, index, strict=True)]
        outbox[part.outbox_origin + np.dot(logical, part.outbox_strides)] = number
        stored[part.origin + np.dot(logical, part.strides)] = number
    assert sorted(outbox) == list(range(part.elements)), "contiguous"
    length, per_group, distance, group = part.runs
    in_slice = part.slice_elements
    assert in_slice % length == 0, "a slice is whole runs"
    for start in range(0, part.slices * in_slice, in_slice):  # as shipping._send does
        at, end = start, min(start + in_slice, part.elements)
        while at < end:
            count, run = min(length, end - at), at // length
            target = part.there + run // per_group * group + run % per_group * distance
            assert (there[target : target + count] == -1).all()
            there[target : target + count] = outbox[at : at + count]
            at += count
    assert (there == stored).all()


def test_slices_are_long_enough_for_a_network_card():
    part = Transfer((0, 0), (4096, 1024), 0, (1024, 1), 4)
    assert part.slice_size * 1024 * 4 == transfers.CARD_SLICE_BYTES and part.slices == 32
    assert Transfer((0, 0), (0, 1024), 0, (1024, 1), 4).slices == 0
    assert Transfer((0, 0), (3, 1 << 20), 0, (1 << 20, 1), 4).slice_size == 1, "rows are not cut"
