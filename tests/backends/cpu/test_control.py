"""Loops, branches, early returns and calls on the CPU."""

import threading

import pytest
import torch
import triton
import triton.language as tl


@triton.jit
def loops(x, out, n, start, step, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    count = 0
    for k in range(start, n, step):
        total = total * 0.5 + tl.load(x + k * BLOCK + i)
        if k % 3 == 0:
            total += 1.0
            count += k
        else:
            total -= 2.0
    tl.store(out + i, total + count)


@pytest.mark.parametrize(("start", "n", "step"), [(0, 0, 1), (0, 1, 1), (0, 7, 1), (2, 9, 3), (5, 2, 1)])
def test_for_with_branches_that_change_tiles(start, n, step):
    x, out = torch.randn(10, 32), torch.empty(32)
    loops[(1,)](x, out, n, start, step, BLOCK=32)
    total, count = torch.zeros(32), 0
    for k in range(start, n, step):
        total = total * 0.5 + x[k]
        total, count = (total + 1, count + k) if k % 3 == 0 else (total - 2, count)
    torch.testing.assert_close(out, total + count)


@triton.jit
def swaps(x, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    a, b, c = tl.load(x + i), tl.load(x + BLOCK + i), tl.load(x + 2 * BLOCK + i)
    for _ in range(n):
        a, b, c = b, c + 1.0, a
    tl.store(out + i, a)
    tl.store(out + BLOCK + i, b)
    tl.store(out + 2 * BLOCK + i, c)


@pytest.mark.parametrize("n", range(5))
def test_values_that_change_places(n):
    x, out = torch.randn(3, 16), torch.empty(3, 16)
    swaps[(1,)](x, out, n, BLOCK=16)
    a, b, c = x
    for _ in range(n):
        a, b, c = b, c + 1, a
    assert torch.equal(out, torch.stack([a, b, c]))


@triton.jit
def collatz(x, out, n, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    if pid >= n:
        return
    value = tl.load(x + pid)
    steps = 0
    while value != 1:
        value = tl.where(value % 2 == 0, value // 2, 3 * value + 1)
        steps += 1
    tl.store(out + pid, steps)


def test_while_and_early_return():
    x, out = torch.arange(1, 30, dtype=torch.int32), torch.full((40,), -1, dtype=torch.int32)
    collatz[(40,)](x, out, 29, BLOCK=1)

    def steps(value):
        count = 0
        while value != 1:
            value, count = (value // 2 if value % 2 == 0 else 3 * value + 1), count + 1
        return count

    assert out[:29].tolist() == [steps(v) for v in x.tolist()] and (out[29:] == -1).all()


@triton.jit(noinline=True)
def weigh(a, b):
    return a * 10 + b, a - b


@triton.jit
def calls(out, n):
    total = 0
    for k in range(n):
        up, down = weigh(k, n)
        total += up - down
    tl.store(out, total)


def test_functions_that_are_not_inlined():
    out = torch.empty(1, dtype=torch.int32)
    calls[(1,)](out, 6)
    assert out.item() == sum(10 * k + 6 - (k - 6) for k in range(6))


@triton.jit
def nested(out, M: tl.constexpr, N: tl.constexpr):
    i, j = tl.arange(0, M), tl.arange(0, N)
    table = tl.zeros([M, N], tl.int32)
    for a in tl.static_range(3):
        for b in range(a, 4):
            if (a + b) % 2 == 0:
                table += i[:, None] * a
            table += j[None, :] * b
    tl.store(out + i[:, None] * N + j[None, :], table)


def test_nested_loops():
    out = torch.empty(8, 16, dtype=torch.int32)
    nested[(1,)](out, M=8, N=16)
    i, j = torch.arange(8)[:, None], torch.arange(16)[None, :]
    expected = torch.zeros(8, 16, dtype=torch.int64)
    for a in range(3):
        for b in range(a, 4):
            expected += (i * a if (a + b) % 2 == 0 else 0) + j * b
    assert torch.equal(out.long(), expected)


@triton.jit
def walks(x, out, rows, stride, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    pointers = x + i
    best = tl.full([BLOCK], -float("inf"), tl.float32)
    place = tl.zeros([BLOCK], tl.int32)
    for k in range(rows):
        value = tl.load(pointers)
        place = tl.where(value > best, k, place)
        best = tl.maximum(best, value)
        pointers += stride
    tl.store(out + i, place)


def test_pointers_that_a_loop_moves():
    x, out = torch.randn(9, 64), torch.empty(64, dtype=torch.int32)
    walks[(1,)](x, out, 9, 64, BLOCK=64)
    assert torch.equal(out.long(), x.argmax(0))


@triton.jit
def counts(out, n):
    k = 0
    while k < n:
        tl.atomic_add(out + k % 2, k)
        k += 1


@triton.jit
def spins(flag, out, n):
    while tl.atomic_add(flag, 0, sem="acquire") < n:
        pass
    tl.store(out, tl.load(flag))


@triton.jit
def spins_through_branches(flag, out, n):
    seen, rounds = 0, 0
    while seen == 0:
        if rounds % 2 == 0:
            seen = (tl.load(flag, volatile=True) >= n).to(tl.int32)
        rounds += 1
    tl.store(out, tl.load(flag))


def test_a_loop_with_atomics_that_do_not_end_it_does_not_wait():
    """Behind 1024 rounds, a loop that waits sleeps in each."""
    out = torch.zeros(2, dtype=torch.int64)
    kernel = counts[(1,)](out, 3000)
    assert out.tolist() == [sum(range(0, 3000, 2)), sum(range(1, 3000, 2))]
    assert "tx_relax" not in kernel.asm["llir"]


@pytest.mark.parametrize("kernel", [spins, spins_through_branches])
def test_a_loop_that_spins_yields_its_core(kernel):
    flag, out = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    compiled = kernel.warmup(flag, out, 3, grid=(1,))
    assert "tx_relax" in compiled.asm["llir"]
    timer = threading.Timer(0.05, flag.fill_, (3,))
    timer.start()
    kernel[(1,)](flag, out, 3)
    timer.join()
    assert out.item() == 3
