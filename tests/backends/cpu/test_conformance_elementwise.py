"""Elementwise operations of the language over every element type and every pair of them."""

import sys

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from conformance import (
    ALL,
    FLOATS,
    FP8,
    INTS,
    SIGNED,
    assert_same,
    convert,
    name,
    numbers,
    of,
    promoted,
    rounded,
    values,
)

N = 64


@triton.jit
def arithmetic(x, ys, outs, flags, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i)
    for k in tl.static_range(len(ys)):
        b = tl.load(ys[k] + i)
        tl.store(outs[k] + i, a + b)
        tl.store(outs[k] + N + i, a - b)
        tl.store(outs[k] + 2 * N + i, a * b)
        tl.store(outs[k] + 3 * N + i, tl.where(a < b, a, b))
        tl.store(flags + k * N + i, a < b)


@pytest.mark.parametrize("left", ALL, ids=name)
def test_promotion(left):
    """Every right operand in one kernel: the results are of the type, and have the values, that the rules give."""
    rights = [right for right in ALL if promoted(left, right) is not None]
    x, ys = values(left, N, seed=1), [values(right, N, seed=2) for right in rights]
    types = [promoted(left, right) for right in rights]
    outs = [torch.zeros(4 * N, dtype=dtype) for dtype in types]
    flags = torch.zeros(len(rights), N, dtype=torch.int8)
    arithmetic[(1,)](x, tuple(ys), tuple(outs), flags, N=N)
    for right, y, dtype, out, flag in zip(rights, ys, types, outs, flags, strict=True):
        a, b = convert(numbers(x), left, dtype), convert(numbers(y), right, dtype)
        with np.errstate(all="ignore"):
            expected = np.concatenate([a + b, a - b, a * b, np.where(a < b, a, b)])
        expected = rounded(expected, dtype) if dtype.is_floating_point else expected
        assert_same(out, expected, right)
        assert_same(flag, (a < b).astype(np.int8), right)


@pytest.mark.slow
@pytest.mark.parametrize("left", ALL, ids=name)
def test_promotion_of_many_values(left, monkeypatch):
    for size in (1, 2, 16, 2048):
        monkeypatch.setattr(sys.modules[__name__], "N", size)
        test_promotion(left)


@triton.jit
def mixed(x, y, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.static_assert((tl.load(x + i) * tl.load(y + i)).dtype == out.dtype.element_ty)


@pytest.mark.parametrize("fp8", FP8, ids=name)
@pytest.mark.parametrize("integer", [torch.int32, torch.uint8], ids=name)
def test_fp8_with_an_integer_has_no_type(fp8, integer):
    with pytest.raises(triton.CompilationError, match="unexpected type"):
        mixed[(1,)](values(fp8, N), values(integer, N), torch.zeros(N), N=N)


@triton.jit
def compare(x, y, out, N: tl.constexpr):
    i = tl.arange(0, N)
    a, b = tl.load(x + i), tl.load(y + i)
    tl.store(out + i, a == b)
    tl.store(out + N + i, a != b)
    tl.store(out + 2 * N + i, a < b)
    tl.store(out + 3 * N + i, a <= b)
    tl.store(out + 4 * N + i, a > b)
    tl.store(out + 5 * N + i, a >= b)


@pytest.mark.parametrize("dtype", ALL, ids=name)
def test_comparisons(dtype):
    x, y = values(dtype, N, seed=3), values(dtype, N, seed=4)
    y[::3] = x[::3]
    out = torch.zeros(6, N, dtype=torch.int8)
    compare[(1,)](x, y, out, N=N)
    a, b = numbers(x), numbers(y)
    assert_same(out, np.stack([a == b, a != b, a < b, a <= b, a > b, a >= b]).astype(np.int8))


@triton.jit
def integers(x, y, s, out, N: tl.constexpr):
    i = tl.arange(0, N)
    a, b, shift = tl.load(x + i), tl.load(y + i), tl.load(s + i)
    tl.store(out + i, a & b)
    tl.store(out + N + i, a | b)
    tl.store(out + 2 * N + i, a ^ b)
    tl.store(out + 3 * N + i, a << shift)
    tl.store(out + 4 * N + i, a >> shift)
    tl.store(out + 5 * N + i, a // b)
    tl.store(out + 6 * N + i, a % b)
    tl.store(out + 7 * N + i, tl.minimum(a, b))
    tl.store(out + 8 * N + i, tl.maximum(a, b))
    tl.store(out + 9 * N + i, ~a)
    tl.store(out + 10 * N + i, -a)
    tl.store(out + 11 * N + i, tl.abs(a))
    tl.store(out + 12 * N + i, tl.cdiv(a, b))


def wrapped(number, dtype):
    bits = 8 * dtype.itemsize
    number &= (1 << bits) - 1
    return number - (1 << bits) if dtype in SIGNED and number >> (bits - 1) else number


@pytest.mark.parametrize("dtype", INTS, ids=name)
def test_integers(dtype):
    """In Python's integers, wrapped around; division rounds to zero, as in C."""
    x, y = values(dtype, N, seed=5), values(dtype, N, seed=6)
    y = torch.where(y.to(torch.int64) == 0, torch.full_like(y, 3), y)
    shift = torch.arange(N).remainder(8 * dtype.itemsize).to(dtype)
    out = torch.zeros(13, N, dtype=dtype)
    integers[(1,)](x, y, shift, out, N=N)

    def divide(a, b):
        return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)

    def ceiling(a, b):
        return divide(wrapped(a + wrapped(b - 1, dtype), dtype), b)

    functions = [
        lambda a, b, s: a & b, lambda a, b, s: a | b, lambda a, b, s: a ^ b, lambda a, b, s: a << s,
        lambda a, b, s: a >> s, lambda a, b, s: divide(a, b), lambda a, b, s: a - divide(a, b) * b,
        lambda a, b, s: min(a, b), lambda a, b, s: max(a, b), lambda a, b, s: ~a, lambda a, b, s: -a,
        lambda a, b, s: abs(a), lambda a, b, s: ceiling(a, b),
    ]  # fmt: skip
    triples = list(zip(x.tolist(), y.tolist(), shift.tolist(), strict=True))
    for row, function in zip(out, functions, strict=True):
        assert row.tolist() == [wrapped(function(*triple), dtype) for triple in triples], functions.index(function)


@triton.jit
def divided(x, y, out, N: tl.constexpr):
    i = tl.arange(0, N)
    a, b = tl.load(x + i), tl.load(y + i)
    tl.store(out + i, tl.where(b != 0, a // b, a % b * 0 + 7))
    tl.store(out + N, tl.load(x) // tl.load(y + 1))


@pytest.mark.parametrize("dtype", INTS, ids=name)
def test_division_by_zero_harms_nobody(dtype):
    """As when a mask has made the divisor zero in the lanes that it hides."""
    x, y = values(dtype, N, seed=18), torch.full((N,), 3, dtype=dtype)
    y[1::2] = 0
    out = torch.zeros(N + 1, dtype=dtype)
    divided[(1,)](x, y, out, N=N)
    quotients = [abs(a) // 3 * (1 if a >= 0 else -1) for a in x.tolist()]
    assert out[:N].tolist()[::2] == quotients[::2]


@triton.jit
def floats(x, y, out, quotients, N: tl.constexpr):
    i = tl.arange(0, N)
    a, b = tl.load(x + i), tl.load(y + i)
    tl.store(out + i, -a)
    tl.store(out + N + i, tl.abs(a))
    tl.store(out + 2 * N + i, tl.minimum(a, b))
    tl.store(out + 3 * N + i, tl.maximum(a, b))
    tl.store(out + 4 * N + i, tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL))
    tl.store(out + 5 * N + i, tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL))
    tl.store(quotients + i, a / b)
    tl.store(quotients + N + i, a % b)


@pytest.mark.parametrize("dtype", FLOATS, ids=name)
def test_floats(dtype):
    """Quotients and remainders of narrow types are float32."""
    x, y = values(dtype, N, seed=7), values(dtype, N, seed=8)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    out, quotients = torch.zeros(6, N, dtype=dtype), torch.zeros(2, N, dtype=wide)
    floats[(1,)](x, y, out, quotients, N=N)
    a, b = numbers(x), numbers(y)
    with np.errstate(all="ignore"):
        expected = [-a, np.abs(a), np.fmin(a, b), np.fmax(a, b), np.minimum(a, b), np.maximum(a, b)]
        assert_same(out, np.stack(expected))
        assert_same(quotients[0], rounded(a / b, wide))
        assert_same(quotients[1], rounded(np.fmod(a, b), wide))


@triton.jit
def fused(x, y, z, out, N: tl.constexpr):
    i = tl.arange(0, N)
    a, b, c = tl.load(x + i), tl.load(y + i), tl.load(z + i)
    tl.store(out + i, tl.fma(a, b, c))
    tl.store(out + N + i, tl.clamp(a, tl.minimum(b, c), tl.maximum(b, c)))


@pytest.mark.parametrize("dtype", FLOATS[2:-1], ids=name)
def test_fma_and_clamp(dtype):
    x, y, z = (values(dtype, N, seed, edges=False) for seed in (9, 10, 11))
    out = torch.zeros(2, N, dtype=dtype)
    fused[(1,)](x, y, z, out, N=N)
    a, b, c = (numbers(t).astype(np.longdouble) for t in (x, y, z))
    assert_same(out[0], rounded((a * b + c).astype(np.float64), dtype))
    assert_same(out[1], np.clip(a, np.minimum(b, c), np.maximum(b, c)).astype(np.float64))


@triton.jit
def whole(x, out, N: tl.constexpr):
    a = tl.load(x + tl.arange(0, N))
    tl.store(out + tl.arange(0, N), tl.floor(a))
    tl.store(out + N + tl.arange(0, N), tl.ceil(a))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=name)
def test_floor_and_ceil(dtype):
    x, out = values(dtype, N, seed=17), torch.zeros(2, N, dtype=dtype)
    whole[(1,)](x, out, N=N)
    assert_same(out, np.stack([np.floor(numbers(x)), np.ceil(numbers(x))]))


@triton.jit
def correctly_rounded(x, y, out, N: tl.constexpr):
    i = tl.arange(0, N)
    a, b = tl.load(x + i), tl.load(y + i)
    tl.store(out + i, tl.div_rn(a, b))
    tl.store(out + N + i, tl.fdiv(a, b))
    tl.store(out + 2 * N + i, tl.sqrt_rn(tl.abs(a)))
    tl.store(out + 3 * N + i, tl.sqrt(tl.abs(a)))


def test_division_and_square_root_are_exact():
    x, y = values(torch.float32, 1024, seed=12), values(torch.float32, 1024, seed=13)
    out = torch.zeros(4, 1024)
    correctly_rounded[(1,)](x, y, out, N=1024)
    a, b = numbers(x), numbers(y)
    with np.errstate(all="ignore"):
        quotient, root = rounded(a / b, torch.float32), rounded(np.sqrt(np.abs(a)), torch.float32)
    assert_same(out, np.stack([quotient, quotient, root, root]))


@triton.jit
def high(x, y, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.umulhi(tl.load(x + i), tl.load(y + i)))


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint32, torch.int64, torch.uint64], ids=name)
def test_umulhi(dtype):
    x, y, out = values(dtype, N, seed=14), values(dtype, N, seed=15), torch.zeros(N, dtype=dtype)
    high[(1,)](x, y, out, N=N)
    bits = 8 * dtype.itemsize
    mask = (1 << bits) - 1
    expected = [wrapped((a & mask) * (b & mask) >> bits, dtype) for a, b in zip(x.tolist(), y.tolist(), strict=True)]
    assert out.tolist() == expected


@triton.jit
def scalars(x, out, n, half: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i)
    tl.store(out + i, a + n)
    tl.store(out + N + i, a * 3)
    tl.store(out + 2 * N + i, half - a)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint16, torch.int64, torch.float16, torch.float64], ids=name)
def test_a_scalar_of_a_lower_kind_takes_the_tensors_type(dtype):
    x = torch.arange(N).to(dtype)
    out = torch.zeros(3, N, dtype=dtype)
    half = 0.5 if dtype.is_floating_point else 2
    scalars[(1,)](x, out, 7, half=half, N=N)
    a = numbers(x)
    with np.errstate(all="ignore"):
        expected = np.stack([a + 7, a * 3, half - a])
    assert_same(out, expected.astype(a.dtype))


FUNCTIONS = {
    # error in units of the last place: (float32, float64)
    "exp": (0.8, 0.8), "exp2": (0.9, 0.9), "log": (0.9, 1.2), "log2": (1.4, 1.4), "sin": (0.51, 0.6),
    "cos": (0.51, 0.6), "rsqrt": (1.5, 1.5), "sqrt": (0.5, 0.5), "erf": (0.6, 1.0), "sigmoid": (2.1, 2.1),
}  # fmt: skip


@triton.jit
def functions(x, out, n, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    a = tl.load(x + i)
    size = tl.abs(a)
    tl.store(out + i, tl.exp(a))
    tl.store(out + n + i, tl.exp2(a))
    tl.store(out + 2 * n + i, tl.log(size))
    tl.store(out + 3 * n + i, tl.log2(size))
    tl.store(out + 4 * n + i, tl.sin(a))
    tl.store(out + 5 * n + i, tl.cos(a))
    tl.store(out + 6 * n + i, tl.rsqrt(size))
    tl.store(out + 7 * n + i, tl.sqrt(size))
    tl.store(out + 8 * n + i, tl.erf(a))
    tl.store(out + 9 * n + i, tl.sigmoid(a))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=name)
def test_math_functions(dtype):
    """Against numpy's long double (erf: Python's double, correct to one unit), to the bound above."""
    from math import erf

    n = 4096
    rng = np.random.default_rng(16)
    x = of(np.concatenate([rng.uniform(-80, 80, n // 2), rng.normal(size=n // 2)]).astype(np.float32), dtype)
    out = torch.zeros(len(FUNCTIONS), n, dtype=dtype)
    functions[(n // 512,)](x, out, n, N=512)
    a = numbers(x).astype(np.longdouble)
    size = np.abs(a)
    exact = {
        "exp": np.exp(a), "exp2": np.exp2(a), "log": np.log(size), "log2": np.log2(size), "sin": np.sin(a),
        "cos": np.cos(a), "rsqrt": 1 / np.sqrt(size), "sqrt": np.sqrt(size), "sigmoid": 1 / (1 + np.exp(-a)),
        "erf": np.array([erf(v) for v in numbers(x)], np.longdouble),
    }  # fmt: skip
    for (function, bounds), row in zip(FUNCTIONS.items(), out.numpy(), strict=True):
        unit = np.spacing(np.abs(exact[function]).astype(row.dtype)).astype(np.longdouble)
        error = np.max(np.abs(row.astype(np.longdouble) - exact[function]) / unit)
        assert error <= bounds[dtype == torch.float64], f"{function}: {error} units of the last place"


@triton.jit
def softmax(x, out, M: tl.constexpr, N: tl.constexpr):
    place = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out + place, tl.softmax(tl.load(x + place), dim=1))


def test_softmax():
    x, out = torch.randn(8, 32, generator=torch.Generator().manual_seed(0)), torch.zeros(8, 32)
    softmax[(1,)](x, out, M=8, N=32)
    torch.testing.assert_close(out, torch.softmax(x.double(), 1).float(), rtol=1e-6, atol=0)
