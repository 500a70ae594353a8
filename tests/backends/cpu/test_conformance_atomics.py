"""Atomic operations of every type that Triton gives them."""

import threading
import time

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from conformance import INTS, assert_same, name, numbers, of, rounded, values

N = 32
WIDE = [torch.int32, torch.uint32, torch.int64, torch.uint64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@triton.jit
def integers(x, y, out, old, N: tl.constexpr):
    i = tl.arange(0, N)
    b = tl.load(y + i)
    inside = i < N - 3
    tl.store(old + i, tl.atomic_add(out + i, b, mask=inside))
    tl.store(old + N + i, tl.atomic_max(out + N + i, b, mask=inside))
    tl.store(old + 2 * N + i, tl.atomic_min(out + 2 * N + i, b, mask=inside))
    tl.store(old + 3 * N + i, tl.atomic_and(out + 3 * N + i, b, mask=inside))
    tl.store(old + 4 * N + i, tl.atomic_or(out + 4 * N + i, b, mask=inside))
    tl.store(old + 5 * N + i, tl.atomic_xor(out + 5 * N + i, b, mask=inside))
    tl.store(old + 6 * N + i, tl.atomic_xchg(out + 6 * N + i, b, mask=inside))
    tl.store(old + 7 * N + i, tl.atomic_cas(out + 7 * N + i, b, tl.load(x + i) + 1))


@pytest.mark.parametrize("dtype", WIDE, ids=name)
def test_integers(dtype):
    x, y = values(dtype, N, seed=1), values(dtype, N, seed=2)
    y[::2] = x[::2]
    out, old = x.repeat(8, 1), torch.zeros(8, N, dtype=dtype)
    integers[(1,)](x, y, out, old, N=N)
    a, b = numbers(x), numbers(y)
    with np.errstate(over="ignore"):
        expected = [a + b, np.maximum(a, b), np.minimum(a, b), a & b, a | b, a ^ b, b, np.where(a == b, a + 1, a)]
    expected = np.stack(expected)
    expected[:7, -3:] = a[-3:]
    assert_same(out, expected)
    assert_same(old[:7, :-3], np.repeat(a[None, :-3], 7, 0))
    assert_same(old[7], a)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.uint8, torch.uint16], ids=name)
def test_narrow_integers_are_refused(dtype):
    x = values(dtype, N)
    with pytest.raises(triton.CompilationError, match="atomic_add does not support"):
        integers[(1,)](x, x, x.repeat(8, 1), x.repeat(8, 1), N=N)


@triton.jit
def added(x, y, out, old, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(old + i, tl.atomic_add(out + i, tl.load(y + i)))
    tl.atomic_add(out + i, tl.load(y + i), mask=i % 2 == 0)
    tl.store(old + N, tl.atomic_add(out + N, tl.load(x)))


@pytest.mark.parametrize("dtype", FLOATS, ids=name)
def test_sums(dtype):
    x, y = values(dtype, N, seed=3), values(dtype, N, seed=4)
    out, old = torch.cat([x, x[:1]]), torch.zeros(N + 1, dtype=dtype)
    added[(1,)](x, y, out, old, N=N)
    a, b = numbers(x), numbers(y)
    with np.errstate(invalid="ignore", over="ignore"):
        once = rounded(a + b, dtype)
        twice = np.where(np.arange(N) % 2 == 0, rounded(once + b, dtype), once)
        assert_same(out, np.append(twice, rounded(2 * a[0], dtype)))
    assert_same(old, np.append(a, a[0]))


@triton.jit
def extremes(y, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.atomic_max(out + i, tl.load(y + i))
    tl.atomic_min(out + N + i, tl.load(y + i))
    tl.atomic_xchg(out + 2 * N + i, tl.load(y + i))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=name)
def test_extremes_of_floats(dtype):
    x, y = (values(dtype, N, seed, edges=False) for seed in (5, 6))
    out = x.repeat(3, 1)
    extremes[(1,)](y, out, N=N)
    assert torch.equal(out, torch.stack([torch.maximum(x, y), torch.minimum(x, y), y]))


@triton.jit
def swapped(x, y, z, old, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(old + i, tl.atomic_cas(x + i, tl.load(y + i), tl.load(z + i)))


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint16, *FLOATS], ids=name)
def test_compare_and_swap(dtype):
    """Floats are compared as bits: a zero with a sign is not the other one."""
    x = torch.arange(N).to(dtype)
    y, z = x.clone(), torch.arange(N).to(torch.int32).add(50).to(dtype)
    y[::3] = 100
    if dtype.is_floating_point:
        y[0] = x[0] = -0.0
        y[1], x[1] = 0.0, -0.0
    before, old = x.clone(), torch.zeros(N, dtype=dtype)
    swapped[(1,)](x, y, z, old, N=N)
    bits = torch.int16 if dtype.itemsize == 2 else {4: torch.int32, 8: torch.int64}[dtype.itemsize]
    same = before.view(bits) == y.view(bits)
    assert torch.equal(x.view(bits), torch.where(same, z.view(bits), before.view(bits)))
    assert torch.equal(old.view(bits), before.view(bits))


@triton.jit
def counted(x, out, N: tl.constexpr):
    tl.atomic_add(out, tl.load(x))
    tl.atomic_add(out + 1 + tl.arange(0, N) % 2, tl.load(x + tl.arange(0, N)))


@pytest.mark.parametrize("dtype", [*WIDE, *FLOATS], ids=name)
def test_nothing_is_lost_among_threads(dtype, monkeypatch):
    monkeypatch.setenv("TRITON_EXT_NUM_THREADS", "4")
    programs = 16
    out = torch.zeros(3, dtype=dtype)
    counted[(programs,)](torch.ones(8, dtype=dtype), out, N=8)
    assert numbers(out).tolist() == [programs, 4 * programs, 4 * programs]


needs_atomic_load = pytest.mark.skipif(not hasattr(tl, "atomic_load"), reason="this Triton has no tl.atomic_load")


@triton.jit
def moved(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.atomic_store(out + i, tl.atomic_load(x + i, mask=i < N - 1), mask=i > 0)
    tl.atomic_store(out + N, tl.atomic_load(x + 1, sem="relaxed"), sem="relaxed", scope="sys")


@needs_atomic_load
@pytest.mark.parametrize("dtype", [*INTS, *FLOATS], ids=name)
def test_loads_and_stores(dtype):
    x = values(dtype, N, seed=7, edges=False)
    x[0] = 5
    out = torch.full((N + 1,), 9, dtype=torch.int32).to(dtype)
    moved[(1,)](x, out, N=N)
    a = numbers(x)
    assert numbers(out)[0] == 9 and numbers(out)[N - 1] == 0
    assert_same(out[1 : N - 1], a[1 : N - 1])
    assert_same(out[N:], a[1:2])


@triton.jit
def polled(flags, out, wanted, timeout, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.atomic_poll(flags + i, wanted, timeout_ns=timeout))
    tl.store(out + N, tl.atomic_poll(flags, wanted, timeout_ns=timeout))


@needs_atomic_load
@pytest.mark.parametrize("dtype", [torch.int16, torch.uint16, *WIDE], ids=name)
def test_a_poll_gives_up_in_time(dtype):
    flags = torch.tensor([3, 4, 3, 5], dtype=dtype)
    out = torch.zeros(5, dtype=torch.int32)
    start = time.perf_counter()
    polled[(1,)](flags, out, 3, 2_000_000, N=4)
    assert out.tolist() == [1, 0, 1, 0, 1]
    assert time.perf_counter() - start < 20


@triton.jit
def waited(flag, data, out):
    tl.atomic_poll(flag, 1)
    tl.store(out, tl.load(data))


@needs_atomic_load
def test_a_poll_waits_for_another_thread():
    flag, data, out = torch.zeros(1, dtype=torch.int32), torch.zeros(1), torch.zeros(1)
    waiting = threading.Thread(target=lambda: waited[(1,)](flag, data, out))
    waiting.start()
    time.sleep(0.3)
    data[0] = 7
    flag[0] = 1
    waiting.join(60)
    assert not waiting.is_alive() and out.item() == 7


def test_references_round_as_torch_does():
    """The reference of this suite itself, where torch rounds once: from float32."""
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 100
    for dtype in (torch.float16, torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn):
        inside = x.clamp(-400, 400)
        assert_same(of(rounded(numbers(inside), dtype), dtype), numbers(inside.to(dtype)))
