"""Loads and stores on the CPU: masks, strides, gathers, scatters, offsets, grids."""

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st


@triton.jit
def copy(x, out, n, OTHER: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n, other=OTHER))


@pytest.mark.parametrize("n", [0, 1, 15, 16, 17, 63, 64, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.int64], ids=str)
def test_masked_loads_give_other(n, dtype):
    x = torch.arange(n).to(dtype)
    out = torch.zeros(128, dtype=dtype)
    copy[(2,)](x, out, n, OTHER=-1, BLOCK=64)
    assert torch.equal(out[:n], x) and (out[n:] == -1).all()


def test_nothing_outside_the_mask_is_touched():
    @triton.jit
    def fill(out, n, BLOCK: tl.constexpr):
        i = tl.arange(0, BLOCK)
        tl.store(out + i, 7.0, mask=(i >= 3) & (i < n))

    out = torch.zeros(64)
    fill[(1,)](out, 20, BLOCK=64)
    assert out.nonzero().flatten().tolist() == list(range(3, 20)) and (out[3:20] == 7).all()


@triton.jit
def strided(x, out, M, N, sm, sn, BM: tl.constexpr, BN: tl.constexpr):
    i = tl.program_id(0) * BM + tl.arange(0, BM)[:, None]
    j = tl.program_id(1) * BN + tl.arange(0, BN)[None, :]
    inside = (i < M) & (j < N)
    tl.store(out + i * N + j, tl.load(x + i * sm + j * sn, mask=inside, other=0.0), mask=inside)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from(["rows", "columns", "every third", "expanded"]))
def test_any_strides(m, n, layout):
    x = {
        "rows": lambda: torch.randn(m, n),
        "columns": lambda: torch.randn(n, m).T,
        "every third": lambda: torch.randn(m, 3 * n)[:, ::3],
        "expanded": lambda: torch.randn(1, n).expand(m, n),
    }[layout]()
    out = torch.empty(m, n)
    strided[(triton.cdiv(m, 8), triton.cdiv(n, 16))](x, out, m, n, *x.stride(), BM=8, BN=16)
    assert torch.equal(out, x)


@triton.jit
def gather_scatter(x, where, out, n, D, BLOCK: tl.constexpr, BD: tl.constexpr):
    i = tl.arange(0, BLOCK)
    d = tl.arange(0, BD)[None, :]
    row = tl.load(where + i, mask=i < n, other=0)
    inside = (i < n)[:, None] & (d < D)
    value = tl.load(x + row[:, None] * D + d, mask=inside, other=0.0)
    tl.store(out + (n - 1 - i)[:, None] * D + d, value, mask=inside)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize(("n", "d"), [(1, 1), (7, 5), (16, 16), (30, 20)])
def test_gathers_and_scatters(n, d, index):
    x, where, out = torch.randn(50, d), torch.randint(0, 50, (n,)).to(index), torch.empty(n, d)
    gather_scatter[(1,)](x, where, out, n, d, BLOCK=32, BD=32)
    assert torch.equal(out, x[where.long()].flip(0))


def test_unaligned_addresses():
    x, out = torch.randn(101), torch.empty(65)
    copy[(1,)](x[1:], out[1:], 64, OTHER=0, BLOCK=64)
    assert torch.equal(out[1:], x[1:65])


def test_reads_happen_before_an_overlapping_write():
    @triton.jit
    def reverse(x, BLOCK: tl.constexpr):
        i = tl.arange(0, BLOCK)
        tl.store(x + i, tl.load(x + BLOCK - 1 - i))

    x = torch.randn(64)
    expected = x.flip(0)
    reverse[(1,)](x, BLOCK=64)
    assert torch.equal(x, expected)


def test_offsets_beyond_31_bits():
    """The address of an element far away, formed and subtracted again: nothing that large is allocated."""

    @triton.jit
    def far(x, out, far_away, BLOCK: tl.constexpr):
        i = tl.arange(0, BLOCK).to(tl.int64) + far_away
        tl.store(out + tl.arange(0, BLOCK), tl.load(x - far_away + i))

    x, out = torch.randn(32), torch.empty(32)
    far[(1,)](x, out, 2**40, BLOCK=32)
    assert torch.equal(out, x)


def test_three_dimensional_grids():
    @triton.jit
    def where(out):
        x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        place = (z * tl.num_programs(1) + y) * tl.num_programs(0) + x
        tl.store(out + place, x + 10 * y + 100 * z)

    out = torch.empty(4 * 3 * 2, dtype=torch.int32)
    where[(4, 3, 2)](out)
    assert out.tolist() == [x + 10 * y + 100 * z for z in range(2) for y in range(3) for x in range(4)]


def test_tensor_descriptors():
    @triton.jit
    def through(x, out, M, N, BM: tl.constexpr, BN: tl.constexpr):
        source = tl.make_tensor_descriptor(x, shape=[M, N], strides=[N, 1], block_shape=[BM, BN])
        target = tl.make_tensor_descriptor(out, shape=[M, N], strides=[N, 1], block_shape=[BM, BN])
        row, column = tl.program_id(0) * BM, tl.program_id(1) * BN
        target.store([row, column], source.load([row, column]) * 2)

    x, out = torch.randn(20, 48), torch.zeros(20, 48)
    through[(3, 3)](x, out, 20, 48, BM=8, BN=16)
    assert torch.equal(out, 2 * x)


@triton.jit
def centre(x, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    inside = i < n
    value = tl.load(x + i, mask=inside, other=3.0)
    centred = tl.where(inside, value - tl.sum(value, axis=0) / n, 5.0)
    tl.store(out + i, centred + inside.to(tl.float32), mask=inside)
    tl.store(out + BLOCK + i, centred + inside.to(tl.float32))


@pytest.mark.parametrize("n", [1, 255, 256, 300])
def test_a_mask_used_as_a_value(n):
    x, out = torch.randn(256), torch.empty(512)
    centre[(1,)](x, out, n, BLOCK=256)
    inside = torch.arange(256) < n
    value = torch.where(inside, x, torch.tensor(3.0))
    expected = torch.where(inside, value - value.sum() / n, torch.tensor(5.0)) + inside.float()
    torch.testing.assert_close(out[256:], expected)
    torch.testing.assert_close(out[:256][inside], expected[inside])


@triton.jit
def where_inside(x, out, n, rows, BLOCK: tl.constexpr, HALF: tl.constexpr, SQUARE: tl.constexpr):
    i = tl.arange(0, BLOCK)
    inside = i < n
    if SQUARE:  # the mask's parts, in other shapes than the access's
        j = tl.arange(0, 16)
        both = (j < rows)[:, None] & inside[None, :]
        value = tl.load(x + j[:, None] * BLOCK + i[None, :], mask=both, other=0.0)
        value = tl.where(inside[None, :], value, 1.0) + tl.where((j < rows)[:, None], 0.0, 2.0)
        tl.store(out + j[:, None] * BLOCK + i[None, :], value, mask=both)
    elif HALF:  # more than the check of the load's mask tells
        value = tl.load(x + i, mask=inside, other=0.0)
        tl.store(out + i, tl.where(i < n - 8, value, 1.0), mask=inside)
    else:  # nothing in memory is masked
        tl.store(out + i, tl.where(inside, tl.load(x + i), 1.0))


@pytest.mark.parametrize("n", [5, 64, 70])
@pytest.mark.parametrize("rows", [3, 16])
@pytest.mark.parametrize("case", ["square", "half", "unmasked"])
def test_selects_by_masks(case, rows, n):
    x, out = torch.randn(16, 64), torch.full((16, 64), -1.0)
    where_inside[(1,)](x, out, n, rows, BLOCK=64, HALF=case == "half", SQUARE=case == "square")
    expected = torch.full((16, 64), -1.0)
    if case == "square":
        expected[:rows, :n] = x[:rows, :n]
    else:
        edge = max(n - 8, 0) if case == "half" else n
        expected[0, :n] = 1.0
        expected[0, :edge] = x[0, :edge]
        if case == "unmasked":
            expected[0, n:] = 1.0
    assert torch.equal(out, expected)


@pytest.mark.parametrize("kernel", ["masked", "unmasked"])
def test_a_version_whose_mask_is_full_selects_nothing(kernel):
    @triton.jit
    def masked(x, out, n, BLOCK: tl.constexpr):
        i = tl.arange(0, BLOCK)
        tl.store(out + i, tl.where(i < n, tl.load(x + i, mask=i < n), 1.0), mask=i < n)

    @triton.jit
    def unmasked(x, out, n, BLOCK: tl.constexpr):
        i = tl.arange(0, BLOCK)
        tl.store(out + i, tl.where(i < n, tl.load(x + i), 1.0))

    x, out = torch.randn(4096), torch.empty(4096)
    compiled = {"masked": masked, "unmasked": unmasked}[kernel][(1,)](x, out, 4096, BLOCK=4096)
    assert torch.equal(out, x)
    blocks = compiled.asm["llir"].split("\n\n")
    loops = [block for block in blocks if "store" in block and "load <" in block]
    assert loops and any("select" not in block and "icmp slt <" not in block for block in loops)


@triton.jit
def write_between(x, first, second, out, n, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    """Two scalar stores, anywhere, after the load and before its elements are used for the last time."""
    i = tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < n, other=0.0) if MASKED else tl.load(x + i)
    total = tl.sum(value, axis=0)
    tl.store(first, total)
    largest = tl.max(value, axis=0)
    tl.store(second, largest)
    tl.store(out + i, value + 1.0, mask=i < n)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("n", [1000, 1024])
@pytest.mark.parametrize(
    ("first", "second"), [(None, None), (0, None), (None, 1023), (1023, 0), (512, 512), (-1, 1024), (7, 8)]
)
def test_a_loaded_tile_survives_scalar_stores(first, second, n, masked):
    memory = torch.randn(1040)  # eight elements on both sides of the tile
    x, apart = memory[8:1032], torch.empty(2)
    before = x.clone()
    places = [apart[k:] if at is None else memory[8 + at :] for k, at in enumerate((first, second))]
    out = torch.zeros(1024)
    write_between[(1,)](x, *places, out, n, MASKED=masked, BLOCK=1024)
    assert torch.equal(out[:n], before[:n] + 1) and (out[n:] == 0).all()
    read = before[: n if masked else 1024]
    assert places[1][0] == torch.cat([read, torch.zeros(1 if masked and n < 1024 else 0)]).max()
    if first != second:
        torch.testing.assert_close(places[0][0], read.sum(), rtol=1e-4, atol=1e-3)


class _Words:
    """Memory of bytes as a pointer to int64, at any address."""

    dtype = torch.int64

    def __init__(self, memory):
        self.memory = memory

    def data_ptr(self):
        return self.memory.data_ptr()


def test_a_scalar_store_may_straddle_the_edge_of_a_loaded_tile():
    @triton.jit
    def kernel(x, place, out, BLOCK: tl.constexpr):
        i = tl.arange(0, BLOCK)
        value = tl.load(x + i)
        tl.store(place, tl.sum(value.to(tl.int64), axis=0))
        tl.store(out + i, value)

    for start in (0, 5, 8, 9, 4096, 4103, 4104):
        memory = torch.randint(0, 100, (4128,), dtype=torch.int8)
        x, out = memory[8:4104], torch.empty(4096, dtype=torch.int8)
        before = x.clone()
        kernel[(1,)](x, _Words(memory[start:]), out, BLOCK=4096)
        assert torch.equal(out, before)
        assert int.from_bytes(memory[start : start + 8].numpy().tobytes(), "little") == before.long().sum()


@pytest.mark.parametrize("pattern", ["in place", "shifted", "gathered", "rows", "branch"])
@pytest.mark.parametrize("at", [None, 3])
def test_uses_of_a_loaded_tile_after_a_scalar_store(pattern, at):
    @triton.jit
    def kernel(x, place, out, PATTERN: tl.constexpr, BLOCK: tl.constexpr):
        i = tl.arange(0, BLOCK)
        value = tl.load(x + i)
        total = tl.sum(value, axis=0)
        if PATTERN == "gathered":
            value = tl.gather(value, (BLOCK - 1 - i), axis=0)
        tl.store(place, total)
        if PATTERN == "shifted":
            tl.store(x + (i + 1) % BLOCK, value)
        elif PATTERN == "in place":
            tl.store(x + i, value + 1)
        elif PATTERN == "rows":
            tl.store(out + i, tl.reshape(tl.trans(tl.reshape(value, [BLOCK // 64, 64])), [BLOCK]))
        elif PATTERN == "branch":
            if total > 0:
                tl.store(out, tl.max(value, axis=0))
            else:
                tl.store(out, tl.min(value, axis=0))
            tl.store(out + 1 + i, value)
        else:
            tl.store(out + i, value)

    x, out = torch.randn(1024), torch.zeros(1025)
    before = x.clone()
    kernel[(1,)](x, torch.empty(1) if at is None else x[at:], out, PATTERN=pattern, BLOCK=1024)
    match pattern:
        case "in place":
            assert torch.equal(x, before + 1)
        case "shifted":
            assert torch.equal(x, before.roll(1))
        case "gathered":
            assert torch.equal(out[:-1], before.flip(0))
        case "rows":
            assert torch.equal(out[:-1], before.view(16, 64).T.flatten())
        case "branch":
            assert out[0] == (before.max() if before.sum() > 0 else before.min()) and torch.equal(out[1:], before)


def test_a_check_chooses_between_a_loaded_tile_and_its_copy():
    x, apart, out = torch.randn(1024), torch.empty(2), torch.empty(1024)
    compiled = write_between[(1,)](x, apart, apart[1:], out, 1024, MASKED=False, BLOCK=1024)
    assert "phi ptr" in compiled.asm["llir"]
