"""What the conformance tests of the CPU backend share: element types, values with edges, exact references.

A reference computes on numpy arrays (integers in their own type, all floats in float64) and rounds once, with
`rounded`, which is written from the definition of the formats.
"""

import numpy as np
import torch

SIGNED = [torch.int8, torch.int16, torch.int32, torch.int64]
UNSIGNED = [torch.uint8, torch.uint16, torch.uint32, torch.uint64]
INTS = [*SIGNED, *UNSIGNED]
FP8 = [torch.float8_e5m2, torch.float8_e4m3fn]
HALVES = [torch.float16, torch.bfloat16]
FLOATS = [*FP8, *HALVES, torch.float32, torch.float64]
ALL = [*INTS, *FLOATS]

# (bits of the mantissa, smallest exponent of a normal number, largest finite number)
_FORMATS = {
    torch.float8_e5m2: (2, -14, 57344.0), torch.float8_e4m3fn: (3, -6, 448.0), torch.float16: (10, -14, 65504.0),
    torch.bfloat16: (7, -126, float(2.0**128 - 2.0**120)), torch.float32: (23, -126, float(2.0**128 - 2.0**104)),
}  # fmt: skip


def name(dtype):
    return str(dtype).removeprefix("torch.")


def rounded(values, dtype, toward_zero=False):
    """float64 values in a narrower format, still as float64: to nearest even; 8-bit formats saturate."""
    values = np.asarray(values, np.float64)
    if dtype == torch.float64:
        return values
    mantissa, smallest, largest = _FORMATS[dtype]
    _, exponents = np.frexp(values)
    unit = np.exp2(np.maximum(exponents - 1, smallest) - mantissa)
    with np.errstate(invalid="ignore"):
        result = (np.trunc if toward_zero else np.rint)(values / unit) * unit
    result = np.where(np.isfinite(values), result, values)
    if dtype in FP8:
        return np.clip(result, -largest, largest)
    beyond = largest if toward_zero else np.inf
    too_large = np.isfinite(values) & (np.abs(result) > largest)
    return np.where(too_large, np.copysign(beyond, values), result)


def values(dtype, n, seed=0, edges=True):
    """A tensor of n values of every size, with the type's special values among them."""
    rng = np.random.default_rng(seed)
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        bits = 8 * info.bits // 8
        raw = [int.from_bytes(rng.bytes(8), "little") >> int(rng.integers(64 - bits, 64)) for _ in range(n)]
        raw = [v if rng.integers(2) or info.min == 0 else -v for v in raw]
        special = [info.min, info.max, 0, 1, info.max - 1, 3] + ([-1, info.min + 1] if info.min else [])
        raw = [*special, *raw][:n] if edges else raw
        raw = [min(max(v, info.min), info.max) for v in raw]
        order = rng.permutation(n)
        return torch.from_numpy(np.array(raw, dtype=name(dtype))[order])
    spread = {torch.float8_e5m2: 6, torch.float8_e4m3fn: 3, torch.float16: 6}.get(dtype, 20)
    raw = rng.normal(size=n) * np.exp2(rng.uniform(-spread, spread, n))
    if edges:
        special = [0.0, -0.0, 1.0, -1.0, np.nan, 0.5, 3.0, -2.5]
        special += [] if dtype == torch.float8_e4m3fn else [np.inf, -np.inf]
        if dtype in _FORMATS:
            mantissa, smallest, largest = _FORMATS[dtype]
            special += [
                largest,
                -largest,
                2.0**smallest,
                2.0 ** (smallest - mantissa),
                -3 * 2.0 ** (smallest - mantissa),
            ]
        raw[: len(special)] = special[:n]
    return of(rounded(raw, dtype)[rng.permutation(n)], dtype)


def of(array, dtype):
    """A tensor of exactly these float64 values."""
    return torch.from_numpy(np.ascontiguousarray(array, np.float64)).to(dtype)


def numbers(tensor):
    """The numpy array of a tensor: integers in their type, floats in float64."""
    return (tensor.to(torch.float64) if tensor.dtype.is_floating_point else tensor).numpy()


def convert(array, source, target):
    """The values of a `source` array in the type `target`, as Triton converts an operand."""
    if target.is_floating_point:
        return rounded(_as_float64(array, target), target)
    return array.astype(name(target))


def _as_float64(array, target):
    """64-bit integers to float64 and on to `target` would round twice: make what is inexact odd first."""
    wide = array.astype(np.float64)
    if target == torch.float64 or array.dtype.kind == "f":
        return wide
    result = []
    for integer, number in zip(array.tolist(), wide.tolist(), strict=True):
        if int(number) != integer:
            magnitude = abs(integer)
            shift = magnitude.bit_length() - 53
            number = float(((magnitude >> shift) | 1) << shift) * (1 if integer > 0 else -1)
        result.append(number)
    return np.array(result)


def promoted(left, right):
    """The type that an arithmetic operation on two tensors computes in, or None where Triton has none."""
    pair = {left, right}
    for widest in (torch.float64, torch.float32, torch.float16):
        if widest in pair:
            return widest
    if torch.bfloat16 in pair:
        return torch.bfloat16 if left == right else torch.float32
    if left in FP8 and right in FP8:
        return left if left == right else torch.float16
    if left in FP8 or right in FP8:
        return None
    if (left in SIGNED) == (right in SIGNED):
        return max(left, right, key=lambda dtype: dtype.itemsize)
    unsigned, signed = (left, right) if left in UNSIGNED else (right, left)
    return unsigned if unsigned.itemsize >= signed.itemsize else signed


def assert_same(got, expected, what=""):
    """Equal, with NaN equal to NaN; `expected` as `numbers` gives it."""
    np.testing.assert_array_equal(numbers(got), expected, err_msg=str(what))
