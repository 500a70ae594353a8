"""Elementwise operations on the CPU, over element types, against torch."""

import pytest
import torch
import triton
import triton.language as tl

INTS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
N = 70


@triton.jit
def binary(x, y, out, n, OP: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    a, b = tl.load(x + i, mask=i < n, other=1), tl.load(y + i, mask=i < n, other=1)
    if OP == "add":
        result = a + b
    elif OP == "sub":
        result = a - b
    elif OP == "mul":
        result = a * b
    elif OP == "div":
        result = a / b
    elif OP == "floordiv":
        result = a // b
    elif OP == "mod":
        result = a % b
    elif OP == "and":
        result = a & b
    elif OP == "or":
        result = a | b
    elif OP == "xor":
        result = a ^ b
    elif OP == "lt":
        result = a < b
    elif OP == "eq":
        result = a == b
    elif OP == "ge":
        result = a >= b
    elif OP == "max":
        result = tl.maximum(a, b)
    elif OP == "min":
        result = tl.minimum(a, b)
    elif OP == "where":
        result = tl.where(a > b, a, b)
    tl.store(out + i, result, mask=i < n)


TORCH = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "and": torch.bitwise_and,
    "or": torch.bitwise_or, "xor": torch.bitwise_xor, "lt": torch.lt, "eq": torch.eq, "ge": torch.ge,
    "max": torch.maximum, "min": torch.minimum, "where": lambda a, b: torch.where(a > b, a, b),
    # Triton rounds to zero, as C does.
    "floordiv": lambda a, b: torch.div(a, b, rounding_mode="trunc"), "mod": torch.fmod,
}  # fmt: skip


def values(dtype, seed, nonzero=False):
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(N, generator=generator).to(dtype)
    info = torch.iinfo(dtype)
    x = torch.randint(max(info.min, -(2**40)), min(info.max, 2**40), (N,), generator=generator).to(dtype)
    x[::7] = 3
    return torch.where(x == 0, torch.ones_like(x), x) if nonzero else x


@pytest.mark.parametrize("op", TORCH)
@pytest.mark.parametrize("dtype", [*INTS, *FLOATS], ids=str)
def test_binary(op, dtype):
    if dtype.is_floating_point and op in ("and", "or", "xor", "floordiv", "mod"):
        pytest.skip("not for floats")
    if not dtype.is_floating_point and op == "div":
        pytest.skip("gives floats")
    x, y = values(dtype, 1), values(dtype, 2, nonzero=True)
    y[::5] = x[::5] if op not in ("floordiv", "mod", "div") else y[::5]
    expected = TORCH[op](x, y)
    out = torch.empty(N, dtype=expected.dtype)
    binary[(1,)](x, y, out, N, OP=op, BLOCK=128)
    if expected.dtype.is_floating_point:
        torch.testing.assert_close(out, expected, rtol=torch.finfo(dtype).eps * 2, atol=0)
    else:
        assert torch.equal(out, expected), "integers wrap around"


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        (torch.int8, torch.int32, torch.int32),
        (torch.uint8, torch.int8, torch.uint8),
        (torch.int32, torch.float32, torch.float32),
        (torch.float16, torch.bfloat16, torch.float16),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.int64, torch.float16, torch.float16),
    ],
    ids=str,
)
def test_promotion(left, right, expected):
    x, y = (torch.randint(0, 20, (N,)).to(dtype) for dtype in (left, right))
    out = torch.empty(N, dtype=expected)
    binary[(1,)](x, y, out, N, OP="add", BLOCK=128)
    assert torch.equal(out, x.to(expected) + y.to(expected))


@triton.jit
def cast(x, out, n, BLOCK: tl.constexpr, BITS: tl.constexpr):
    i = tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < n)
    tl.store(out + i, value.to(out.dtype.element_ty, bitcast=BITS), mask=i < n)


@pytest.mark.parametrize("source", [*INTS, *FLOATS, torch.bool], ids=str)
@pytest.mark.parametrize("target", [*INTS, *FLOATS], ids=str)
def test_casts(source, target):
    x = torch.randint(0, 2 if source == torch.bool else 100, (N,)).to(source)
    out = torch.empty(N, dtype=target)
    cast[(1,)](x, out, N, BLOCK=128, BITS=False)
    assert torch.equal(out, x.to(target))


def test_rounding_of_narrow_floats():
    x = torch.randn(N) * 3
    x[:4] = torch.tensor([float("nan"), float("inf"), 1e-30, 65520.0])
    for dtype in (torch.float16, torch.bfloat16):
        out = torch.empty(N, dtype=dtype)
        cast[(1,)](x, out, N, BLOCK=128, BITS=False)
        torch.testing.assert_close(out, x.to(dtype), rtol=0, atol=0, equal_nan=True)


def test_doubles_are_rounded_once():
    """Just above the middle of two halves: by way of float32 it would be the middle, and go down."""
    x = torch.tensor(
        [1 + 2**-11 + 2**-40, -(1 + 2**-11 + 2**-40), 1e300, float("nan"), 0.0, 1e-10] * 10, dtype=torch.float64
    )
    half, bfloat = torch.empty(60, dtype=torch.float16), torch.empty(60, dtype=torch.bfloat16)
    cast[(1,)](x, half, 60, BLOCK=64, BITS=False)
    assert half[:3].tolist() == [1 + 2**-10, -(1 + 2**-10), float("inf")] and half[3].isnan()
    cast[(1,)](x + 2**-8 - 2**-11, bfloat, 60, BLOCK=64, BITS=False)
    assert bfloat[0] == 1 + 2**-7


def test_bits_are_kept():
    x = torch.randn(N)
    out = torch.empty(N, dtype=torch.int32)
    cast[(1,)](x, out, N, BLOCK=128, BITS=True)
    assert torch.equal(out, x.view(torch.int32))


@triton.jit
def shifts(x, left, arithmetic, negative, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < n)
    tl.store(left + i, value << 3, mask=i < n)
    tl.store(arithmetic + i, value >> 2, mask=i < n)
    tl.store(negative + i, -(~value), mask=i < n)


@pytest.mark.parametrize("dtype", INTS, ids=str)
def test_shifts_and_signs(dtype):
    x = values(dtype, 5)
    left, arithmetic, negative = (torch.empty_like(x) for _ in range(3))
    shifts[(1,)](x, left, arithmetic, negative, N, BLOCK=128)
    assert torch.equal(left, x << 3) and torch.equal(arithmetic, x >> 2) and torch.equal(negative, -(~x))


@triton.jit
def broadcasts(x, y, out, M: tl.constexpr, K: tl.constexpr):
    i, j = tl.arange(0, M), tl.arange(0, K)
    a, b = tl.load(x + i), tl.load(y + j)
    table = a[:, None] * 2 + b[None, :]
    flipped = tl.trans(table)
    folded = tl.reshape(flipped, [M * K])
    tl.store(out + tl.arange(0, M * K), folded)


@pytest.mark.parametrize(("m", "k"), [(1, 8), (8, 1), (4, 16), (32, 32)])
def test_broadcast_transpose_reshape(m, k):
    x, y, out = torch.randn(m), torch.randn(k), torch.empty(m * k)
    broadcasts[(1,)](x, y, out, m, k)
    torch.testing.assert_close(out, (2 * x[:, None] + y[None, :]).T.reshape(-1))


@triton.jit
def joins(x, y, joined, interleaved, B: tl.constexpr):
    i = tl.arange(0, B)
    a, b = tl.load(x + i), tl.load(y + i)
    pair = tl.join(a, b)
    first, second = tl.split(pair)
    tl.store(joined + i, first - second)
    tl.store(interleaved + tl.arange(0, 2 * B), tl.interleave(a, b))


def test_join_split_interleave():
    x, y, joined, interleaved = torch.randn(32), torch.randn(32), torch.empty(32), torch.empty(64)
    joins[(1,)](x, y, joined, interleaved, B=32)
    assert torch.equal(joined, x - y)
    assert torch.equal(interleaved, torch.stack([x, y], 1).flatten())
