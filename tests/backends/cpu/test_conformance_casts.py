"""Conversions and bit casts between every two element types."""

import re

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from conformance import ALL, FLOATS, FP8, HALVES, INTS, SIGNED, assert_same, convert, name, numbers, of, rounded, values

N = 256


@triton.jit
def cast(x, outs, N: tl.constexpr, BITS: tl.constexpr, ROUNDING: tl.constexpr):
    i = tl.arange(0, N)
    for k in tl.static_range(len(outs)):
        tl.store(outs[k] + i, tl.load(x + i).to(outs[k].dtype.element_ty, bitcast=BITS, fp_downcast_rounding=ROUNDING))


def casted(x, targets, bits=False, rounding=None):
    outs = [torch.zeros(N, dtype=dtype) for dtype in targets]
    cast[(1,)](x, tuple(outs), N=N, BITS=bits, ROUNDING=rounding)
    return zip(targets, outs, strict=True)


@pytest.mark.parametrize("source", INTS, ids=name)
def test_from_integers(source):
    """To integers the low bits, to floats rounded once."""
    x = values(source, N)
    for target, out in casted(x, [*INTS, *HALVES, torch.float32, torch.float64]):
        assert_same(out, convert(numbers(x), source, target), target)


@pytest.mark.parametrize("source", FLOATS, ids=name)
def test_from_floats_to_floats(source):
    x = values(source, N, seed=1)
    for target, out in casted(x, FLOATS):
        assert_same(out, rounded(numbers(x), target), target)


@pytest.mark.parametrize("source", FLOATS[2:], ids=name)
def test_from_floats_to_integers(source):
    """Rounded to zero; what does not fit is undefined."""
    x = of(rounded(np.random.default_rng(2).uniform(0, 127, N), source), source)
    for target, out in casted(x, INTS):
        assert_same(out, numbers(x).astype(name(target)), target)
    for target, out in casted(-x, SIGNED):
        assert_same(out, (-numbers(x)).astype(name(target)), target)


@pytest.mark.parametrize("source", FLOATS[1:], ids=name)
def test_rounding_towards_zero(source):
    targets = [dtype for dtype in FLOATS if dtype.itemsize < source.itemsize]
    if not targets:
        with pytest.raises(triton.CompilationError, match="fp_downcast_rounding"):
            casted(values(source, N), [torch.float32], rounding="rtz")
        return
    x = values(source, N, seed=3)
    for target, out in casted(x, targets, rounding="rtz"):
        expected = rounded(numbers(x), target, toward_zero=True)
        assert_same(out, expected, target)


@pytest.mark.parametrize("target", [*FP8, *HALVES], ids=name)
def test_ties_go_to_even_and_nothing_is_rounded_twice(target):
    """Every number of the format, the middle between it and the next one, and what is just beside the middle."""
    bits = torch.arange(0, 1 << (8 * target.itemsize - 1), 1 if target.itemsize == 1 else 61)
    exact = numbers(bits.to(torch.uint8 if target.itemsize == 1 else torch.int16).view(target))
    exact = np.sort(exact[np.isfinite(exact)])
    middle = (exact[1:] + exact[:-1]) / 2
    for source in (torch.float32, torch.float64):
        step = 2.0**-23 if source == torch.float32 else 2.0**-51
        points = np.concatenate([exact, middle, middle * (1 + step), middle * (1 - step), -middle])
        for start in range(0, len(points), N):
            x = of(np.resize(points[start : start + N], N), source)
            for _, out in casted(x, [target]):
                assert_same(out, rounded(numbers(x), target))


@triton.jit
def summed(x, out, N: tl.constexpr):
    a = tl.load(x + tl.arange(0, N))
    tl.store(out + tl.arange(0, N), a * a + a)
    tl.atomic_add(out, tl.sum(a.to(tl.float32)).to(tl.bfloat16))


def test_bfloat16_needs_no_instruction_and_no_library():
    """LLVM would call a function that is not there, on a processor without conversions to bfloat16."""
    x, out = torch.ones(N, dtype=torch.bfloat16), torch.zeros(N, dtype=torch.bfloat16)
    llir = summed[(1,)](x, out, N=N).asm["llir"]
    assert out.tolist() == [2.0 + N] + [2.0] * (N - 1)
    assert not [line for line in llir.splitlines() if re.search(r"fptrunc .*bfloat|(fadd|fmul) .*bfloat", line)]


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_bit_casts(size):
    """Every pattern of bits survives, NaNs among them."""
    types = [dtype for dtype in ALL if dtype.itemsize == size]
    bits = torch.from_numpy(np.random.default_rng(4).integers(0, 256, N * size, dtype=np.uint8))
    for source in types:
        for target, out in casted(bits.view(source), types, bits=True):
            assert torch.equal(out.view(torch.uint8), bits), (source, target)


def test_bit_casts_need_equal_sizes():
    with pytest.raises(triton.CompilationError, match="size"):
        casted(values(torch.int8, N), [torch.int32], bits=True)


@triton.jit
def truths(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    flag = tl.load(x + i).to(tl.int1)
    tl.store(out + i, flag)
    tl.store(out + N + i, flag.to(tl.int32) + 1)


@pytest.mark.parametrize("source", [*INTS, *FLOATS[2:], torch.bool], ids=name)
def test_booleans(source):
    x = torch.tensor([0, 1, 2, 0] * (N // 4)).to(source)
    out = torch.zeros(2, N, dtype=torch.int32)
    truths[(1,)](x, out, N=N)
    expected = (numbers(x) != 0).astype(np.int32)
    assert_same(out, np.stack([expected, expected + 1]))


@triton.jit
def constants(out, N: tl.constexpr):
    i = tl.arange(0, N)
    T: tl.constexpr = out.dtype.element_ty
    tl.store(out + i, tl.full([N], 1.5, T))
    tl.store(out + N + i, tl.zeros([N], T))
    tl.store(out + 2 * N + i, tl.full([N], -0.25, tl.float32).to(T))
    tl.store(out + 3 * N + i, tl.full([N], float("inf"), T))
    tl.store(out + 4 * N + i, tl.full([N], float("nan"), T))


@pytest.mark.parametrize("dtype", FLOATS, ids=name)
def test_constants(dtype):
    out = torch.zeros(5, N, dtype=dtype)
    constants[(1,)](out, N=N)
    infinity = float("inf") if dtype not in FP8 else {torch.float8_e5m2: 57344.0}.get(dtype, 448.0)
    assert_same(out[:3], np.repeat([[1.5], [0.0], [-0.25]], N, 1))
    assert np.isnan(numbers(out[4])).all()
    seen = numbers(out[3])
    assert (seen == seen[0]).all() and (seen[0] == infinity or dtype in FP8)


@triton.jit
def through_addresses(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    address = (x + i).to(tl.int64)
    tl.store(out + i, tl.load((address + 4).to(tl.pointer_type(tl.float32)), mask=i < N - 1, other=0.0))
    bits = x.to(tl.pointer_type(tl.int32), bitcast=True)
    tl.store((out + N).to(tl.pointer_type(tl.int32), bitcast=True) + i, tl.load(bits + i))


def test_pointers_are_integers_and_back():
    x, out = torch.randn(N), torch.zeros(2, N)
    through_addresses[(1,)](x, out, N=N)
    assert torch.equal(out[0, :-1], x[1:]) and torch.equal(out[1], x)
