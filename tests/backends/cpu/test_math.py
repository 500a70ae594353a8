"""The math library against numpy's long double: errors in units of the last place, and special values."""

import re

import mpmath
import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from triton_ext.backends.cpu import libdevice

INF, NAN = float("inf"), float("nan")


@triton.jit
def unary(x, out, n, FUNCTION: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, FUNCTION(tl.load(x + i, mask=i < n)), mask=i < n)


@triton.jit
def binary(x, y, out, n, FUNCTION: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, FUNCTION(tl.load(x + i, mask=i < n), tl.load(y + i, mask=i < n)), mask=i < n)


def apply(function, *arrays, dtype=None):
    """`function` of the kernel language on numpy arrays."""
    tensors = [torch.from_numpy(array) for array in arrays]
    out = torch.empty(len(arrays[0]), dtype=dtype or tensors[0].dtype)
    kernel = unary if len(arrays) == 1 else binary
    kernel[(triton.cdiv(len(out), 1024),)](*tensors, out, len(out), FUNCTION=function, BLOCK=1024)
    return out.numpy()


SPECIAL = [
    0.0, -0.0, INF, -INF, NAN, 1.0, -1.0, 2.0, -2.0, 0.5, -0.5, 1e-45, -1e-45, 1e-38, -1e-38, 3e38, -3e38, 1e-10,
    88.7, 88.73, -87.4, -103.9, -104.1, 127.99, 128.0, -126.5, -149.0, -149.4, -150.1, 1e22, -1e22,
]  # fmt: skip


def values(dtype):
    rng = np.random.default_rng(0)
    parts = [
        rng.normal(size=4000) * 3, rng.uniform(-110, 110, 4000), np.exp(rng.uniform(-80, 80, 4000)),
        rng.uniform(-1, 1, 4000), 1 + rng.normal(size=2000) * 1e-3, -np.exp(rng.uniform(-30, 30, 2000)), SPECIAL,
    ]  # fmt: skip
    return np.concatenate(parts).astype(dtype)


@np.errstate(all="ignore")
def worst(got, exact, dtype):
    """The largest error in units of the last place; infinite where a special value is wrong."""
    rounded = exact.astype(dtype)
    spacing = np.spacing(np.abs(rounded))
    error = np.abs(got.astype(np.longdouble) - exact) / np.where(np.isfinite(spacing), spacing, 1)
    error = np.where(np.isfinite(rounded) & np.isfinite(got), error, 0)
    same = (got == rounded) | (np.isnan(got) & np.isnan(rounded))
    wrong = ~same & ~(np.isfinite(got) & np.isfinite(rounded))
    wrong |= (got == 0) & (rounded == 0) & (np.signbit(got) != np.signbit(rounded))
    return float(np.where(wrong, INF, error).max())


UNARY = {
    "exp": np.exp, "exp2": np.exp2, "expm1": np.expm1, "log": np.log, "log2": np.log2, "log10": np.log10,
    "log1p": np.log1p, "sin": np.sin, "cos": np.cos, "tan": np.tan, "tanh": np.tanh, "sinh": np.sinh, "cosh": np.cosh,
    "asinh": np.arcsinh, "acosh": np.arccosh, "atanh": np.arctanh, "atan": np.arctan, "asin": np.arcsin,
    "acos": np.arccos, "rsqrt": lambda x: 1 / np.sqrt(x), "sqrt": np.sqrt, "cbrt": np.cbrt, "floor": np.floor,
    "ceil": np.ceil, "trunc": np.trunc, "rint": np.rint, "nearbyint": np.rint, "fabs": np.abs,
    "exp10": lambda x: np.power(np.longdouble(10), x),
}  # fmt: skip


@pytest.mark.parametrize("name", UNARY)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_unary(name, dtype):
    x = values(dtype)
    with np.errstate(all="ignore"):
        exact = UNARY[name](x.astype(np.longdouble))
    assert worst(apply(getattr(libdevice, name), x), exact, dtype) <= (2 if dtype == np.float32 else 4)


@pytest.mark.parametrize("function", [tl.exp, tl.exp2, tl.log, tl.log2, tl.sin, tl.cos, tl.sqrt, tl.rsqrt, tl.erf])
def test_language_and_library_agree(function):
    x = values(np.float32)
    np.testing.assert_array_equal(apply(function, x), apply(getattr(libdevice, function.__name__), x))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_erf(dtype):
    x = values(dtype)
    exact = torch.special.erf(torch.from_numpy(x.astype(np.float64))).numpy().astype(np.longdouble)
    assert worst(apply(tl.erf, x), exact, dtype) <= (2 if dtype == np.float32 else 4)


def erfcx(x):
    return mpmath.exp(x * x) * mpmath.erfc(x)


WITHOUT_NUMPY = {
    "erfinv": (mpmath.erfinv, [0.0, -0.0, 1.0, -1.0, 0.5, 1e-30, -1e-8, 0.999999, -0.9999], (-1, 1)),
    "erfcx": (erfcx, [0.0, -0.0, 24.99, 25.01, 1e3, -5.0], (-5, 40)),
    "cyl_bessel_i0": (lambda x: mpmath.besseli(0, x), [0.0, -0.0, 29.99, -30.01, 88.0], (-80, 80)),
    "cyl_bessel_i1": (lambda x: mpmath.besseli(1, x), [0.0, -0.0, 29.99, -30.01, 88.0, 1e-20], (-80, 80)),
}  # fmt: skip


@pytest.mark.parametrize("name", WITHOUT_NUMPY)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_functions_that_numpy_lacks(name, dtype):
    function, special, (low, high) = WITHOUT_NUMPY[name]
    x = np.concatenate([special, np.random.default_rng(0).uniform(low, high, 400)]).astype(dtype)
    with mpmath.workdps(40):
        exact = np.array([np.longdouble(mpmath.nstr(function(mpmath.mpf(float(v))), 25)) for v in x])
    exact = np.where(exact == 0, np.longdouble(x), exact)  # mpmath has no negative zero
    assert worst(apply(getattr(libdevice, name), x), exact, dtype) <= (2 if dtype == np.float32 else 4)


@pytest.mark.parametrize("name", ["exp", "log", "sin", "tanh", "erf", "atan"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_once(name, dtype):
    x = torch.linspace(-8, 8, 4096).to(dtype)
    out = torch.empty_like(x)
    unary[(4,)](x, out, 4096, FUNCTION=getattr(libdevice, name), BLOCK=1024)
    exact = getattr(torch, name)(x.double())
    torch.testing.assert_close(out, exact.to(dtype), rtol=2**-8 if dtype == torch.bfloat16 else 2**-11, atol=0,
                               equal_nan=True)  # fmt: skip


@pytest.mark.parametrize("name", ["exp", "exp2", "log", "log2"])
def test_frequent_functions_of_float32_call_no_library(name):
    x = torch.ones(1024)
    compiled = unary.warmup(x, x, 1024, FUNCTION=getattr(libdevice, name), BLOCK=1024, grid=(1,))
    assert not re.findall(r"\bcall\b.*@(?!llvm\.)\S*", compiled.asm["llir"])


BINARY = {
    "pow": np.power, "atan2": np.arctan2, "hypot": np.hypot, "copysign": np.copysign, "fmod": np.fmod,
    "fmin": np.fmin, "fmax": np.fmax,
}  # fmt: skip


@pytest.mark.parametrize("name", BINARY)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_binary(name, dtype):
    rng = np.random.default_rng(1)
    special = np.array([*SPECIAL[:11], 3.0, -3.0, 2.5, -2.5, 1e30, -1e30], dtype)
    pairs = np.array(np.meshgrid(special, special)).reshape(2, -1)
    x = np.concatenate([pairs[0], rng.normal(size=3000) * 10, np.exp(rng.uniform(-30, 30, 3000))]).astype(dtype)
    y = np.concatenate([pairs[1], rng.normal(size=3000) * 10, rng.uniform(-5, 5, 3000)]).astype(dtype)
    with np.errstate(all="ignore"):
        exact = BINARY[name](x.astype(np.longdouble), y.astype(np.longdouble))
    got = apply(getattr(libdevice, name), x, y)
    if name in ("fmin", "fmax"):  # of zeros with two signs either is right
        got, exact = got + dtype(0), exact + 0
    assert worst(got, exact, dtype) <= (2 if dtype == np.float32 else 4)


@triton.jit
def classify(x, out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    v = tl.load(x + i)
    flags = (libdevice.isnan(v) != 0) + 2 * libdevice.isinf(v) + 4 * libdevice.signbit(v) + 8 * libdevice.finitef(v)
    tl.store(out + i, flags)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_predicates(dtype):
    x = torch.tensor([0.0, -0.0, INF, -INF, NAN, 1.0, -1.0, 5e-8], dtype=dtype)
    out = torch.empty(8, dtype=torch.int32)
    classify[(1,)](x, out, BLOCK=8)
    expected = x.isnan() + 2 * x.isinf() + 4 * x.signbit() + 8 * x.isfinite()
    expected[4] = out[4] & 4 | 1  # the sign of a NaN may be either
    assert out.tolist() == expected.tolist()


@triton.jit
def integer_functions(x, out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    v = tl.load(x + i)
    tl.store(out + i, libdevice.clz(v))
    tl.store(out + BLOCK + i, libdevice.popc(v))
    tl.store(out + 2 * BLOCK + i, libdevice.ffs(v))
    tl.store(out + 3 * BLOCK + i, libdevice.llrint(v * 0.5))
    tl.store(out + 4 * BLOCK + i, libdevice.ldexp(v.to(tl.float32), 3))
    tl.store(out + 5 * BLOCK + i, libdevice.pow(v, 2.0))


def test_integers():
    x = torch.tensor([0, 1, -1, 6, 7, 255, 4096, -5], dtype=torch.int32)
    out = torch.empty(6, 8)
    integer_functions[(1,)](x, out, BLOCK=8)
    assert out[0].tolist() == [32, 31, 0, 29, 29, 24, 19, 0]
    assert out[1].tolist() == [v.bit_count() if v >= 0 else 32 - (~v).bit_count() for v in x.tolist()]
    assert out[2].tolist() == [0, 1, 1, 2, 1, 1, 13, 1]
    assert out[3].tolist() == [float(round(v / 2)) for v in x.tolist()]
    assert torch.equal(out[4], x * 8.0) and torch.equal(out[5], x.float() ** 2)


@triton.jit
def sigmoid_and_division(x, y, out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    a, b = tl.load(x + i), tl.load(y + i)
    tl.store(out + i, tl.sigmoid(a))
    tl.store(out + BLOCK + i, tl.div_rn(a, b))
    tl.store(out + 2 * BLOCK + i, tl.fma(a, b, a))
    tl.store(out + 3 * BLOCK + i, tl.sqrt_rn(tl.abs(a)))


def test_composed():
    torch.manual_seed(0)
    x, y = torch.randn(512) * 20, torch.randn(512)
    out = torch.empty(4, 512)
    sigmoid_and_division[(1,)](x, y, out, BLOCK=512)
    torch.testing.assert_close(out[0], torch.sigmoid(x), rtol=1e-6, atol=0)
    assert torch.equal(out[1], x / y)
    assert torch.equal(out[2], (x.double() * y.double() + x.double()).float())
    assert torch.equal(out[3], x.abs().double().sqrt().float())
