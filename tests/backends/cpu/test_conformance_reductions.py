"""Reductions and scans over every type: ties, NaN, combinations of several operands, order."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from conformance import ALL, FLOATS, FP8, INTS, assert_same, name, numbers, of, values

M, N = 8, 32


@triton.jit
def extremes(x, out, where, AXIS: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    place = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    v = tl.load(x + place)
    L: tl.constexpr = N if AXIS == 0 else M
    i = tl.arange(0, L)
    tl.store(out + i, tl.max(v, AXIS))
    tl.store(out + L + i, tl.min(v, AXIS))
    best, index = tl.max(v, AXIS, return_indices=True)
    tl.store(out + 2 * L + i, best)
    tl.store(where + i, index)
    tl.store(where + L + i, tl.argmin(v, AXIS, tie_break_left=True))
    tl.store(where + 2 * L + i, tl.argmax(v, AXIS, tie_break_left=False))
    tl.store(where + 3 * L + i, tl.argmin(v, AXIS, tie_break_left=False))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", ALL, ids=name)
def test_extremes_and_their_places(dtype, axis):
    """Few different values, so that there are ties: the first one wins, or any one where that is enough."""
    x = values(dtype, 6, seed=1, edges=False)[torch.from_numpy(np.random.default_rng(2).integers(0, 6, (M, N)))]
    length = N if axis == 0 else M
    out, where = torch.zeros(3, length, dtype=dtype), torch.zeros(4, length, dtype=torch.int32)
    extremes[(1,)](x, out, where, AXIS=axis, M=M, N=N)
    a = numbers(x)
    assert_same(out, np.stack([a.max(axis), a.min(axis), a.max(axis)]))
    assert_same(where[:2], np.stack([a.argmax(axis), a.argmin(axis)]).astype(np.int32))
    for row, extreme in zip(where[2:].numpy(), (a.max(axis), a.min(axis)), strict=True):
        chosen = np.take_along_axis(a, np.expand_dims(row, axis), axis).squeeze(axis)
        assert np.array_equal(chosen, extreme)


@triton.jit
def sums(x, out, product, AXIS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, XOR: tl.constexpr, WIDE: tl.constexpr):
    place = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    v = tl.load(x + place)
    L: tl.constexpr = N if AXIS == 0 else M
    i = tl.arange(0, L)
    tl.store(out + i, tl.sum(v, AXIS, dtype=WIDE))
    if XOR:
        tl.store(product + i, tl.xor_sum(v, AXIS))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", ALL, ids=name)
def test_sums(dtype, axis):
    """Integers narrower than 32 bits are summed as 32 bits, fp8 as it is asked to be; all others in their own type."""
    length = N if axis == 0 else M
    if dtype in INTS:
        x = values(dtype, M * N, seed=3).reshape(M, N)
        wide = {1: "int32", 2: "int32"}.get(dtype.itemsize, name(dtype).removeprefix("u"))
        kind = getattr(torch, ("u" if name(dtype).startswith("u") else "") + wide)
    else:
        x = of(np.random.default_rng(4).integers(-4, 5, (M, N)), dtype)
        kind = torch.float32 if dtype in (*FP8, torch.bfloat16) else dtype
    out, parity = torch.zeros(length, dtype=kind), torch.zeros(length, dtype=dtype)
    wide_type = tl.float32 if dtype in FP8 else None
    sums[(1,)](x, out, parity, AXIS=axis, M=M, N=N, XOR=dtype in INTS, WIDE=wide_type)
    a = numbers(x)
    assert_same(out, a.sum(axis, dtype=numbers(out).dtype))
    if dtype in INTS:
        assert_same(parity, np.bitwise_xor.reduce(a, axis))


@triton.jit
def whole(x, out, N: tl.constexpr):
    v = tl.load(x + tl.arange(0, N))
    tl.store(out, tl.sum(v))
    tl.store(out + 1, tl.max(v))
    tl.store(out + 2, tl.min(v))
    tl.store(out + 3, tl.reduce(v, 0, _larger))
    tl.store(out + 4 + tl.arange(0, 1), tl.sum(v, keep_dims=True))


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@pytest.mark.parametrize("dtype", FLOATS[2:], ids=name)
@pytest.mark.parametrize("size", [1, 2, 64, 512])
def test_nan(dtype, size):
    """A sum with NaN is NaN; max and min leave it out unless it is all there is, or they are told to keep it."""
    for place in (0, size // 2, size - 1):
        x = torch.ones(size, dtype=dtype)
        x[place] = float("nan")
        out = torch.zeros(5, dtype=dtype)
        whole[(1,)](x, out, N=size)
        nan, one = float("nan"), 1.0 if size > 1 else float("nan")
        assert_same(out, np.array([nan, one, one, nan, nan]))


@triton.jit
def _merge(count_a, mean_a, square_a, count_b, mean_b, square_b):
    count = count_a + count_b
    delta = mean_b - mean_a
    share = count_b.to(tl.float32) / count
    mean = mean_a + delta * share
    return count, mean, square_a + square_b + delta * delta * count_a * share


@triton.jit
def moments(x, out, AXIS: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    place = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    v = tl.load(x + place)
    ones = tl.full([M, N], 1, tl.int32)
    count, mean, square = tl.reduce((ones, v, tl.zeros_like(v)), AXIS, _merge)
    L: tl.constexpr = N if AXIS == 0 else M
    tl.store(out + tl.arange(0, L), mean)
    tl.store(out + L + tl.arange(0, L), square / count)


@pytest.mark.parametrize("axis", [0, 1])
def test_three_operands_of_two_types(axis):
    x = torch.randn(M, N, generator=torch.Generator().manual_seed(5))
    out = torch.zeros(2, N if axis == 0 else M)
    moments[(1,)](x, out, AXIS=axis, M=M, N=N)
    torch.testing.assert_close(out[0].double(), x.double().mean(axis), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(out[1].double(), x.double().var(axis, correction=0), rtol=1e-5, atol=1e-6)


@triton.jit
def three_axes(x, out, AXIS: tl.constexpr, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    i = tl.arange(0, A)[:, None, None] * B * C + tl.arange(0, B)[None, :, None] * C + tl.arange(0, C)[None, None, :]
    result = tl.ravel(tl.sum(tl.load(x + i), AXIS))
    tl.store(out + tl.arange(0, result.numel), result)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("shape", [(4, 8, 16), (1, 2, 32), (16, 1, 2)], ids=str)
def test_three_dimensions(shape, axis):
    x = torch.arange(np.prod(shape), dtype=torch.float32).reshape(shape)
    expected = x.sum(axis)
    out = torch.zeros(expected.numel())
    three_axes[(1,)](x, out, AXIS=axis, A=shape[0], B=shape[1], C=shape[2])
    assert torch.equal(out, expected.flatten())


@triton.jit
def _affine(a1, b1, a2, b2):
    """First x -> a1 x + b1, then x -> a2 x + b2: an order that cannot be changed."""
    return a1 * a2, b1 * a2 + b2


@triton.jit
def _or(a, b):
    return a | b


@triton.jit
def scans(x, y, sums, a, b, AXIS: tl.constexpr, REVERSE: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    place = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    v, w = tl.load(x + place), tl.load(y + place)
    tl.store(sums + place, tl.cumsum(v, AXIS, reverse=REVERSE))
    first, second = tl.associative_scan((v, w), AXIS, _affine, reverse=REVERSE)
    tl.store(a + place, first)
    tl.store(b + place, second)


def along(array, axis, reverse, step):
    """step(previous, here) along an axis, in order."""
    lines = np.moveaxis(array, axis, 0)
    lines = lines[::-1] if reverse else lines
    result = [lines[0]]
    for line in lines[1:]:
        result.append(step(result[-1], line))
    return np.moveaxis(np.stack(result[::-1] if reverse else result), 0, axis)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", [*INTS, torch.float32, torch.float64], ids=name)
def test_scans(dtype, axis, reverse):
    """Integers wrap around; the floats are powers of two and small integers, of which all results are exact."""
    if dtype in INTS:
        x, y = (values(dtype, M * N, seed=seed).reshape(M, N) for seed in (6, 7))
    else:
        rng = np.random.default_rng(8)
        x, y = of(rng.choice([1.0, -1.0], (M, N)), dtype), of(rng.integers(-3, 4, (M, N)), dtype)
    total, a, b = (torch.zeros(M, N, dtype=dtype) for _ in range(3))
    scans[(1,)](x, y, total, a, b, AXIS=axis, REVERSE=reverse, M=M, N=N)
    pairs = np.stack([numbers(x), numbers(y)], -1)

    def step(before, here):
        (a1, b1), (a2, b2) = np.moveaxis(before, -1, 0), np.moveaxis(here, -1, 0)
        return np.stack([a1 * a2, b1 * a2 + b2], -1)

    with np.errstate(over="ignore"):
        assert_same(total, along(pairs[..., 0], axis, reverse, lambda before, here: before + here))
        expected = along(pairs, axis, reverse, step)
    assert_same(a, expected[..., 0])
    assert_same(b, expected[..., 1])


@triton.jit
def one_axis(x, out, N: tl.constexpr, REVERSE: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.cumprod(tl.load(x + i), 0, reverse=REVERSE))
    tl.store(out + N + i, tl.associative_scan(tl.load(x + i).to(tl.int32), 0, _or, reverse=REVERSE))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("size", [1, 2, 128])
def test_products_and_bits_along_one_axis(size, reverse):
    x = torch.from_numpy(np.random.default_rng(9).choice([1, 1, 1, 2], size)).float()
    out = torch.zeros(2, size)
    one_axis[(1,)](x, out, N=size, REVERSE=reverse)
    a = x.numpy()
    assert_same(out[0], along(a, 0, reverse, lambda p, q: p * q).astype(np.float64))
    assert_same(out[1], along(a.astype(int), 0, reverse, lambda p, q: p | q).astype(np.float64))


@triton.jit
def narrow_scans(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.cumsum(tl.load(x + i), 0, dtype=tl.float32))
    tl.store(out + N + i, tl.cumsum(tl.load(x + i).to(tl.float32), 0))


@pytest.mark.parametrize("dtype", FLOATS[:4], ids=name)
def test_scans_of_narrow_floats_in_a_wider_type(dtype):
    x = of(np.random.default_rng(10).integers(-4, 5, N), dtype)
    out = torch.zeros(2, N)
    narrow_scans[(1,)](x, out, N=N)
    assert_same(out, np.stack([np.cumsum(numbers(x))] * 2))


@triton.jit
def counts(x, flags, out, BINS: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr):
    i = tl.arange(0, N)
    v = tl.load(x + i)
    result = tl.histogram(v, BINS, mask=tl.load(flags + i) != 0) if MASKED else tl.histogram(v, BINS)
    tl.store(out + tl.arange(0, BINS), result)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", [torch.int32, torch.uint32], ids=name)
@pytest.mark.parametrize(("size", "bins"), [(1, 1), (8, 16), (512, 4), (512, 64)])
def test_histograms(size, bins, kind, masked):
    """Values without a bin are not counted."""
    rng = np.random.default_rng(11)
    a, flags = rng.integers(0, bins + bins // 4, size), rng.integers(0, 2, size).astype(np.int8)
    out = torch.zeros(bins, dtype=torch.int32)
    x = torch.from_numpy(a).to(kind)
    counts[(1,)](x, torch.from_numpy(flags), out, BINS=bins, N=size, MASKED=masked)
    counted = a[flags != 0] if masked else a
    assert out.tolist() == np.bincount(counted, minlength=2 * bins + 1)[:bins].tolist()
