"""Reductions and scans on the CPU."""

import pytest
import torch
import triton
import triton.language as tl


@triton.jit
def reduce_rows(x, out, M: tl.constexpr, N: tl.constexpr, AXIS: tl.constexpr, OP: tl.constexpr):
    i, j = tl.arange(0, M), tl.arange(0, N)
    tile = tl.load(x + i[:, None] * N + j[None, :])
    if OP == "sum":
        result = tl.sum(tile, AXIS)
    elif OP == "max":
        result = tl.max(tile, AXIS)
    elif OP == "min":
        result = tl.min(tile, AXIS)
    elif OP == "argmax":
        result = tl.argmax(tile, AXIS)
    elif OP == "argmin":
        result = tl.argmin(tile, AXIS)
    elif OP == "xor":
        result = tl.xor_sum(tile, AXIS)
    tl.store(out + tl.arange(0, M * N // (M if AXIS == 0 else N)), result)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("op", ["sum", "max", "min", "argmax", "argmin"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int32], ids=str)
@pytest.mark.parametrize(("m", "n"), [(1, 1), (8, 4), (32, 64)])
def test_axes_and_types(m, n, axis, op, dtype):
    x = torch.randint(-8, 8, (m, n)).to(dtype)  # exact in every type, with many ties
    if op.startswith("arg"):
        best = x.amax(axis, keepdim=True) if op == "argmax" else x.amin(axis, keepdim=True)
        expected = (x == best).int().argmax(axis)  # the first of equals
    else:
        expected = {"sum": x.sum, "max": x.amax, "min": x.amin}[op](axis)
    out = torch.empty(expected.shape, dtype=expected.dtype if not op.startswith("arg") else torch.int32)
    reduce_rows[(1,)](x, out, m, n, axis, op)
    assert torch.equal(out.double(), expected.double())


def test_xor():
    x, out = torch.randint(0, 1 << 20, (16, 32), dtype=torch.int32), torch.empty(16, dtype=torch.int32)
    reduce_rows[(1,)](x, out, 16, 32, 1, "xor")
    expected = torch.zeros(16, dtype=torch.int32)
    for j in range(32):
        expected ^= x[:, j]
    assert torch.equal(out, expected)


@triton.jit
def _complex_multiply(a_re, a_im, b_re, b_im):
    return a_re * b_re - a_im * b_im, a_re * b_im + a_im * b_re


@triton.jit
def complex_product(re, im, out, N: tl.constexpr):
    i = tl.arange(0, N)
    x, y = tl.reduce((tl.load(re + i), tl.load(im + i)), 0, _complex_multiply)
    tl.store(out, x)
    tl.store(out + 1, y)


def test_a_combination_of_ones_own_over_two_tensors():
    z = torch.polar(torch.rand(16, dtype=torch.float64) * 0.2 + 0.9, torch.rand(16, dtype=torch.float64))
    out = torch.empty(2, dtype=torch.float64)
    complex_product[(1,)](z.real.contiguous(), z.imag.contiguous(), out, N=16)
    torch.testing.assert_close(torch.view_as_complex(out), z.prod())


@triton.jit
def scan(x, sums, products, N: tl.constexpr, REVERSE: tl.constexpr):
    i = tl.arange(0, N)
    value = tl.load(x + i)
    tl.store(sums + i, tl.cumsum(value, 0, reverse=REVERSE))
    tl.store(products + i, tl.cumprod(value, 0, reverse=REVERSE))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("n", [1, 2, 32, 128])
def test_scans(n, reverse):
    x = torch.rand(n, dtype=torch.float64) + 0.5
    sums, products = torch.empty_like(x), torch.empty_like(x)
    scan[(1,)](x, sums, products, n, reverse)
    source = x.flip(0) if reverse else x
    expected = [source.cumsum(0), source.cumprod(0)]
    for got, want in zip((sums, products), expected, strict=True):
        torch.testing.assert_close(got, want.flip(0) if reverse else want)


def test_reducing_everything_to_a_scalar():
    @triton.jit
    def total(x, out, M: tl.constexpr, N: tl.constexpr):
        tile = tl.load(x + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :])
        tl.store(out, tl.sum(tile) + tl.max(tl.max(tile, 0), 0))

    x, out = torch.randn(16, 32, dtype=torch.float64), torch.empty(1, dtype=torch.float64)
    total[(1,)](x, out, 16, 32)
    torch.testing.assert_close(out[0], x.sum() + x.max())


def test_nan_is_kept_where_asked():
    @triton.jit
    def largest(x, out, N: tl.constexpr):
        value = tl.load(x + tl.arange(0, N))
        tl.store(out, tl.max(value, 0))
        tl.store(out + 1, tl.sum(value, 0))

    x, out = torch.randn(32), torch.empty(2)
    x[5] = float("nan")
    largest[(1,)](x, out, N=32)
    assert out[0] == x[~x.isnan()].max() and out[1].isnan()
