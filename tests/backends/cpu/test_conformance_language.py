"""Functions, tuples, control flow inside of elements, debugging; and what is refused."""

import ctypes
import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl

from conformance import ALL, FLOATS, INTS, assert_same, name, numbers, values
from triton_ext.errors import CompileError, LaunchError

N = 32
needs_map = pytest.mark.skipif(not hasattr(tl, "map_elementwise"), reason="this Triton has no tl.map_elementwise")


@triton.jit
def _branches(a, b):
    if a < b:
        return b
    return a


@triton.jit
def _loops(a, limit):
    steps = 0
    while a < limit:
        a = a * 2 + 1
        steps += 1
    return a, steps


@triton.jit
def _pairs(a0, a1, b0, b1):
    return a0 + a1, a1 - a0, b0 + b1, b1 - b0


@triton.jit
def mapped(x, y, out, N: tl.constexpr):
    place = tl.arange(0, 4)[:, None] * (N // 4) + tl.arange(0, N // 4)[None, :]
    a, b = tl.load(x + place), tl.load(y + place)
    tl.store(out + place, tl.map_elementwise(_branches, a, b))
    sums, differences = tl.map_elementwise(_pairs, a, b, pack=2)
    tl.store(out + N + place, sums)
    tl.store(out + 2 * N + place, differences)


@needs_map
@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.float32, torch.float64, torch.bfloat16], ids=name)
def test_map_elementwise(dtype):
    """Two neighbours at a time where the function takes two."""
    x, y = (torch.randint(0, 50, (N,), generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in (1, 2))
    out = torch.zeros(3, N, dtype=dtype)
    mapped[(1,)](x, y, out, N=N)
    a, b = x.reshape(-1, 2), y.reshape(-1, 2)
    sums = torch.stack([a.sum(1, dtype=dtype), a[:, 1] - a[:, 0]], 1)
    differences = torch.stack([b.sum(1, dtype=dtype), b[:, 1] - b[:, 0]], 1)
    assert torch.equal(out, torch.stack([torch.maximum(x, y), sums.flatten(), differences.flatten()]))


@triton.jit
def looped(x, limit, out, N: tl.constexpr):
    i = tl.arange(0, N)
    value, steps = tl.map_elementwise(_loops, tl.load(x + i), tl.load(limit + i))
    tl.store(out + i, value + tl.sum(value))
    tl.store(out + N + i, steps)


@needs_map
def test_every_element_loops_as_often_as_it_needs():
    x = torch.arange(N, dtype=torch.int32)
    limit, out = torch.full((N,), 1000, dtype=torch.int32), torch.zeros(2, N, dtype=torch.int32)
    looped[(1,)](x, limit, out, N=N)
    results = []
    for a in range(N):
        steps = 0
        while a < 1000:
            a, steps = 2 * a + 1, steps + 1
        results.append((a, steps))
    total = sum(a for a, _ in results)
    assert out.tolist() == [[a + total for a, _ in results], [steps for _, steps in results]]


class Pair(NamedTuple):
    first: tl.tensor
    second: tl.tensor


@triton.jit
def _swapped(pair):
    return Pair(pair.second, pair.first)


@triton.jit
def _sum_of(parts):
    total = parts[0]
    for k in tl.static_range(1, len(parts)):
        total += parts[k]
    return total


@triton.jit
def grouped(pointers, factors, out, pair, N: tl.constexpr):
    i = tl.arange(0, N)
    parts = (tl.load(pointers[0] + i) * factors[0], tl.load(pointers[1] + i) * factors[1], pair.first + i)
    tl.store(out + i, _sum_of(parts))
    tensors = Pair(tl.load(pointers[0] + i), tl.load(pointers[1] + i))
    for _ in range(3):
        tensors = _swapped(tensors)
    tl.store(out + N + i, tensors.first - tensors.second * pair.second)


def test_tuples_and_named_tuples_as_arguments_values_and_loop_carried():
    x, y, out = torch.randn(N), torch.randn(N), torch.zeros(2, N)
    grouped[(1,)]((x, y), (2.0, 3), out, Pair(5, 0.5), N=N)
    torch.testing.assert_close(out[0], 2 * x + 3 * y + 5 + torch.arange(N))
    torch.testing.assert_close(out[1], y - 0.5 * x)


@triton.jit(noinline=True)
def _inner(a, flag):
    if flag:
        return a * 2
    return a + 1


@triton.jit(noinline=True)
def _outer(a, n):
    total = a
    for k in range(n):
        total = _inner(total, k % 2 == 0)
    return total, n


@triton.jit(noinline=True)
def _write(out, value):
    tl.store(out, value)


@triton.jit
def _nothing_above(x, limit):
    """An early return from an inlined function."""
    total = tl.sum(tl.load(x + tl.arange(0, 8)))
    if tl.load(x) > limit:
        return total * 0
    return total


@triton.jit
def calls(x, out, n):
    value = tl.load(x)
    total, count = _outer(value, n)
    tl.store(out, total)
    _write(out + 1, count + _inner(value, n > 100))
    tl.store(out + 2, _nothing_above(x, 1))
    tl.store(out + 3, _nothing_above(x, 100))
    if n > 4:
        return
    tl.store(out + 4, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.uint8, torch.float16], ids=name)
def test_functions_that_call_functions(dtype):
    for n in (3, 5):
        x, out = torch.full((8,), 2).to(dtype), torch.zeros(5, dtype=torch.float64)
        calls[(1,)](x, out, n)
        total = 2
        for k in range(n):
            total = total * 2 if k % 2 == 0 else total + 1
        assert out.tolist() == [total, n + 3, 0, 16, n <= 4]


@triton.jit
def shown(x, s, i, N: tl.constexpr, HEX: tl.constexpr):
    tl.device_print("tile", tl.load(x + tl.arange(0, N)), hex=HEX)
    tl.device_print("%d scalars", tl.load(s), i)
    tl.device_print("100% nothing")


def printed(capfd, kernel, *args, **kwargs):
    capfd.readouterr()
    kernel(*args, **kwargs)
    ctypes.CDLL(None).fflush(None)
    return capfd.readouterr().out.splitlines()


@pytest.mark.parametrize("dtype", ALL, ids=name)
def test_device_print(dtype, capfd):
    """Each element with its place; unsigned integers without a sign."""
    largest = torch.iinfo(dtype).max if dtype in INTS else 1.5
    x = torch.tensor([largest, 1, 0, 2], dtype=torch.float64 if dtype in FLOATS else dtype).to(dtype)
    lines = printed(capfd, shown[(1,)], x, torch.tensor([-7], dtype=torch.int16), -3, N=4, HEX=False)
    numbers_shown = [line.split()[-1] for line in lines if "tile" in line]
    assert [float(v) if dtype in FLOATS else int(v) for v in numbers_shown] == x.to(
        torch.float64 if dtype in FLOATS else dtype
    ).tolist()
    assert all(f"idx ({k})" in line for k, line in enumerate(line for line in lines if "tile" in line))
    assert [line.split()[-1] for line in lines if "%d scalars" in line] == ["-7", "-3"]
    assert sum("100% nothing" in line for line in lines) == 1


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint16, torch.int64], ids=name)
def test_device_print_in_hexadecimal(dtype, capfd):
    x = torch.tensor([1, 100], dtype=dtype)
    if dtype != torch.uint16:
        x[0] = -1
    lines = printed(capfd, shown[(1,)], x, torch.zeros(1), 0, N=2, HEX=True)
    digits = 2 * dtype.itemsize
    first = (1 << (8 * dtype.itemsize)) - 1 if dtype != torch.uint16 else 1
    expected = [f"0x{first:0{digits}x}", f"0x{100:0{digits}x}"]
    assert [line.split()[-1] for line in lines if "tile" in line] == expected


@triton.jit
def checked(x, out, N: tl.constexpr):
    v = tl.load(x + tl.arange(0, N))
    tl.device_assert(v >= 0, "no negative numbers")
    tl.device_assert(tl.load(x) < 100, "starts small")
    tl.store(out + tl.arange(0, N), v)


def test_device_assert():
    x, out = torch.arange(8.0), torch.zeros(8)
    checked[(1,)](x, out, N=8, debug=True)
    assert torch.equal(out, x)
    for value, place, message in ((-1.0, 3, "no negative numbers"), (100.0, 0, "starts small")):
        x = torch.arange(8.0)
        x[place] = value
        with pytest.raises(LaunchError, match=rf"test_conformance_language\.py:\d+: {message}"):
            checked[(1,)](x, out, N=8, debug=True)
    checked[(1,)](x, out, N=8)  # without debug=True there is no check


@triton.jit
def assembly(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i)
    b = tl.inline_asm_elementwise("mov $0, $1;", "=r,r", [a], dtype=tl.float32, is_pure=True, pack=1)
    tl.store(out + i, b)


@triton.jit
def assembly_twice(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i)
    b, c = tl.inline_asm_elementwise(
        "mov $0, $2; mov $1, $2;", "=r,=r,r", [a], dtype=(tl.float32, tl.int32), is_pure=False, pack=1
    )
    tl.store(out + i, b + c)


@pytest.mark.parametrize("kernel", [assembly, assembly_twice], ids=["one result", "two results"])
def test_inline_assembly_is_refused(kernel):
    """It is written for another processor: the error names the operation and the author's line."""
    message = r"test_conformance_language\.py:(\d+): .*tt\.elementwise_inline_asm"
    with pytest.raises(CompileError, match=message) as caught:
        kernel[(1,)](torch.zeros(8), torch.zeros(8), N=8)
    line = int(re.search(message, str(caught.value))[1])
    source = Path(__file__).read_text().splitlines()
    assert "inline_asm_elementwise" in source[line - 1]


@pytest.mark.parametrize("kind", ["float8e4b8", "float8e5b16", "float8e4b15"])
def test_other_kinds_of_fp8_are_refused(kind):
    @triton.jit
    def other(x, T: tl.constexpr):
        tl.store(x, tl.load(x).to(T).to(tl.float32))

    with pytest.raises(triton.CompilationError, match=r"not supported in this architecture|provide conversion"):
        other[(1,)](torch.zeros(1), T=getattr(tl, kind))


@triton.jit
def conditioned(x, out, n):
    k = 0
    total = 0.0
    while tl.condition(k < n, disable_licm=True):
        total += tl.load(x + k)
        k += 1
    for j in tl.range(0, n, num_stages=3, loop_unroll_factor=2):
        total += tl.load(x + j)
    tl.static_assert(True)
    tl.store(out, total)


@pytest.mark.skipif(not hasattr(tl, "condition"), reason="this Triton has no tl.condition")
def test_loops_with_options():
    x, out = torch.arange(11.0), torch.zeros(1)
    conditioned[(1,)](x, out, 11)
    assert out.item() == 110


@triton.jit
def every_operation(x, out, N: tl.constexpr):
    """The operators of a tensor, in the order in which Python would do them."""
    i = tl.arange(0, N)
    a = tl.load(x + i)
    b = 3 - a * -a // (1 + a % 4) + (a << 1) - (a >> 1)
    c = (b > 2) & ~(b == 5) | (a != b)
    tl.store(out + i, tl.where(c, b ^ 1, -b))


def test_operators_compose():
    x, out = values(torch.int8, N, seed=3).to(torch.int32), torch.zeros(N, dtype=torch.int32)
    every_operation[(1,)](x, out, N=N)
    expected = []
    for a in x.tolist():
        divisor = 1 + (abs(a) % 4 if a >= 0 else -(abs(a) % 4))
        if divisor == 0:
            divisor = 1
        product = a * -a
        quotient = abs(product) // abs(divisor) * (1 if (product < 0) == (divisor < 0) else -1)
        b = 3 - quotient + (a << 1) - (a >> 1)
        expected.append((b ^ 1) if (b > 2 and b != 5) or a != b else -b)
    assert_same(out, numbers(torch.tensor(expected, dtype=torch.int32)))
