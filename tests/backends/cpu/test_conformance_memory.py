"""Loads, stores and tensor descriptors, for elements of every type."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton._C.libtriton import passes

from conformance import ALL, FP8, name, values

N = 64


def bits(tensor):
    """For comparing, and for filling, without a look at the values."""
    return tensor.view(getattr(torch, f"int{8 * tensor.itemsize}"))


@triton.jit
def copied(x, index, out, n, stride, N: tl.constexpr):
    i = tl.arange(0, N)
    inside = i < n
    tl.store(out + i, tl.load(x + i, mask=inside, other=0.0), mask=i < N - 1)
    tl.store(out + N + i, tl.load(x + tl.load(index + i), mask=inside, other=0.0))
    tl.store(out + 2 * N + tl.load(index + i), tl.load(x + i), mask=inside)
    tl.store(out + 3 * N + i, tl.load(x + i * stride, mask=i * stride < N, other=0.0))
    tl.store(out + 4 * N, tl.load(x + 3))
    tl.store(out + 4 * N + 1, tl.load(x + 3, mask=n < 0, other=0.0))
    tl.store(out + 4 * N + 2, tl.load(x + 4), mask=n < 0)
    tl.store(out + 4 * N + 3, tl.load(x + 5, volatile=True))


@pytest.mark.parametrize("n", [0, 1, 37, N])
@pytest.mark.parametrize("dtype", [*ALL, torch.bool], ids=name)
def test_masks_gathers_scatters_strides_scalars(dtype, n):
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.integers(0, 2, N) != 0) if dtype == torch.bool else values(dtype, N, seed=1)
    index = torch.from_numpy(rng.permutation(N).astype(np.int32))
    out = torch.zeros(5 * N, dtype=dtype)
    bits(out)[:] = 1
    expected = bits(out).clone().reshape(5, N)
    copied[(1,)](x, index, out, n, 3, N=N)
    a, where = bits(x), index.long()
    inside = torch.arange(N) < n
    expected[0] = torch.where(inside, a, 0)
    expected[0, N - 1] = 1
    expected[1] = torch.where(inside, a[where], 0)
    expected[2, where[inside]] = a[inside]
    expected[3] = 0
    expected[3, : len(a[::3])] = a[::3]
    expected[4, :4] = torch.stack([a[3], torch.zeros_like(a[3]), torch.ones_like(a[3]), a[5]])
    assert torch.equal(bits(out).reshape(5, N), expected)


@triton.jit
def described(x, out, rows, columns, r, c, M: tl.constexpr, N: tl.constexpr, PADDING: tl.constexpr):
    source = tl.make_tensor_descriptor(x, [rows, columns], [columns, 1], [M, N], padding_option=PADDING)
    target = tl.make_tensor_descriptor(out, [rows, columns], [columns, 1], [M, N])
    tile = source.load([r, c])
    tl.store(out + rows * columns + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :], tile)
    target.store([r, c], tile)


@pytest.mark.parametrize(
    ("dtype", "padding"),
    [(t, "zero") for t in ALL if t not in FP8] + [(t, "nan") for t in ALL if t.is_floating_point and t not in FP8],
    ids=lambda value: value if isinstance(value, str) else name(value),
)
def test_descriptors_pad_what_is_outside(dtype, padding):
    rows, columns, m, n = 5, 24, 4, 16
    x = torch.arange(rows * columns).remainder(100).reshape(rows, columns).to(dtype)
    fill = float("nan") if padding == "nan" else 0
    padded = torch.full((rows + 8, columns + 32), 3).to(dtype)
    padded[:] = torch.full_like(padded, fill)
    padded[4 : 4 + rows, 16 : 16 + columns] = x
    for r, c in [(0, 0), (3, 16), (-2, -8), (4, 20), (-4, 0), (5, 24)]:
        out = torch.zeros(rows * columns + m * n, dtype=dtype)
        described[(1,)](x, out, rows, columns, r, c, M=m, N=n, PADDING=padding)
        tile = padded[4 + r : 4 + r + m, 16 + c : 16 + c + n]
        torch.testing.assert_close(out[rows * columns :].reshape(m, n), tile, rtol=0, atol=0, equal_nan=True)
        written = torch.zeros_like(padded)
        written[4 + r : 4 + r + m, 16 + c : 16 + c + n] = tile
        inside = written[4 : 4 + rows, 16 : 16 + columns]
        torch.testing.assert_close(out[: rows * columns].reshape(rows, columns), inside, rtol=0, atol=0)


@triton.jit
def described_fp8(x, out, M: tl.constexpr, N: tl.constexpr):
    source = tl.make_tensor_descriptor(x, [M, N], [N, 1], [M, N])
    tl.make_tensor_descriptor(out, [M, N], [N, 1], [M, N]).store([1, 0], source.load([1, 0]))


@pytest.mark.parametrize("dtype", FP8, ids=name)
def test_descriptors_of_fp8(dtype):
    x, out = values(dtype, 4 * 16, seed=2).reshape(4, 16), torch.zeros(4, 16, dtype=dtype)
    described_fp8[(1,)](x, out, M=4, N=16)
    assert torch.equal(bits(out)[1:], bits(x)[1:]) and (bits(out)[0] == 0).all()


@triton.jit
def three_dimensions(x, out, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    source = tl.make_tensor_descriptor(x, [A, B, C], [B * C, C, 1], [1, B, C])
    target = tl.make_tensor_descriptor(out, [A, B, C], [B * C, C, 1], [1, B, C])
    for i in range(A):
        target.store([A - 1 - i, 0, 0], source.load([i, 0, 0]))


def test_descriptors_of_three_dimensions():
    x, out = torch.randn(4, 8, 16), torch.zeros(4, 8, 16)
    three_dimensions[(1,)](x, out, A=4, B=8, C=16)
    assert torch.equal(out, x.flip(0))


@triton.jit
def rows_by_index(x, index, gathered, scattered, ROWS: tl.constexpr, COLUMNS: tl.constexpr, K: tl.constexpr):
    k = tl.load(index + tl.arange(0, K))
    source = tl.make_tensor_descriptor(x, [ROWS, COLUMNS], [COLUMNS, 1], [1, 16])
    target = tl.make_tensor_descriptor(scattered, [ROWS, COLUMNS], [COLUMNS, 1], [1, 16])
    rows = source.gather(k, 16)
    tl.store(gathered + tl.arange(0, K)[:, None] * 16 + tl.arange(0, 16)[None, :], rows)
    target.scatter(rows, k, 16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.int32], ids=name)
def test_descriptors_gather_and_scatter_rows(dtype):
    x = torch.arange(16 * 40).reshape(16, 40).to(dtype)
    index = torch.tensor([3, 0, 15, 7, 1, 2, 9, 5], dtype=torch.int32)
    gathered, scattered = torch.zeros(8, 16, dtype=dtype), torch.zeros_like(x)
    rows_by_index[(1,)](x, index, gathered, scattered, ROWS=16, COLUMNS=40, K=8)
    expected = torch.zeros_like(x)
    expected[index.long(), 16:32] = x[index.long(), 16:32]
    assert torch.equal(gathered, x[index.long(), 16:32]) and torch.equal(scattered, expected)


@triton.jit
def reduced(x, out, M: tl.constexpr, N: tl.constexpr, FLOAT: tl.constexpr):
    source = tl.make_tensor_descriptor(x, [M, N], [N, 1], [M, N])
    tile = source.load([0, 0])
    for k in tl.static_range(1 if FLOAT else 6):
        target = tl.make_tensor_descriptor(out + k * M * N, [M, N], [N, 1], [M, N])
        if k == 0:
            target.atomic_add([1, 0], tile)
        elif k == 1:
            target.atomic_max([1, 0], tile)
        elif k == 2:
            target.atomic_min([1, 0], tile)
        elif k == 3:
            target.atomic_and([1, 0], tile)
        elif k == 4:
            target.atomic_or([1, 0], tile)
        else:
            target.atomic_xor([1, 0], tile)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint32, torch.float32], ids=name)
def test_descriptors_reduce_into_memory(dtype):
    m, n = 4, 8
    rng = np.random.default_rng(3)
    x, y = (torch.from_numpy(rng.integers(0, 100, (m, n))).to(dtype) for _ in range(2))
    out = y.repeat(6, 1, 1)
    reduced[(1,)](x, out, M=m, N=n, FLOAT=dtype.is_floating_point)
    a, b = x[:-1].double(), y[1:].double()
    expected = [a + b]
    if not dtype.is_floating_point:
        expected += [torch.maximum(a, b), torch.minimum(a, b)]
        expected += [op(a.long(), b.long()).double() for op in (torch.bitwise_and, torch.bitwise_or, torch.bitwise_xor)]
    for part, want in zip(out, expected, strict=False):
        assert torch.equal(part[1:].double(), want) and torch.equal(part[0].double(), y[0].double())


@triton.jit
def block_pointers(x, out, M, N, BLOCK: tl.constexpr):
    source = tl.make_block_ptr(x, (M, N), (N, 1), (0, 0), (BLOCK, BLOCK), (1, 0))
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    for _ in range(0, N, BLOCK):
        total += tl.load(source, boundary_check=(0, 1), padding_option="zero")
        source = tl.advance(source, (0, BLOCK))
    target = tl.make_block_ptr(out, (M, BLOCK), (BLOCK, 1), (0, 0), (BLOCK, BLOCK), (1, 0))
    tl.store(target, total, boundary_check=(0, 1))


def test_block_pointers_where_triton_has_them():
    """Triton 3.9 does not, and says so."""
    x, out = torch.randn(5, 21, generator=torch.Generator().manual_seed(0)), torch.zeros(5, 8)
    if not hasattr(passes.ttir, "add_rewrite_tensor_pointer"):
        with pytest.raises(triton.CompilationError, match="Block pointers"):
            block_pointers[(1,)](x, out, 5, 21, BLOCK=8)
        return
    block_pointers[(1,)](x, out, 5, 21, BLOCK=8)
    padded = torch.zeros(5, 24)
    padded[:, :21] = x
    torch.testing.assert_close(out, padded.reshape(5, 3, 8).sum(1))
