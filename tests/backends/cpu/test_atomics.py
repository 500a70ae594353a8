"""Atomic operations on the CPU: old values, masks, contention among threads."""

import pytest
import torch
import triton
import triton.language as tl


@triton.jit
def update(x, where, value, old, n, OP: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    inside = i < n
    place = x + tl.load(where + i, mask=inside, other=0)
    v = tl.load(value + i, mask=inside, other=0)
    if OP == "add":
        before = tl.atomic_add(place, v, mask=inside)
    elif OP == "max":
        before = tl.atomic_max(place, v, mask=inside)
    elif OP == "min":
        before = tl.atomic_min(place, v, mask=inside)
    elif OP == "and":
        before = tl.atomic_and(place, v, mask=inside)
    elif OP == "or":
        before = tl.atomic_or(place, v, mask=inside)
    elif OP == "xor":
        before = tl.atomic_xor(place, v, mask=inside)
    elif OP == "xchg":
        before = tl.atomic_xchg(place, v, mask=inside)
    tl.store(old + i, before, mask=inside)


OPERATIONS = {
    "add": lambda a, b: a + b, "max": max, "min": min, "and": lambda a, b: a & b, "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b, "xchg": lambda a, b: b,
}  # fmt: skip


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32, torch.float64, torch.float16], ids=str)
def test_tiles(op, dtype):
    if dtype.is_floating_point and op in ("and", "or", "xor"):
        pytest.skip("not for floats")
    if dtype == torch.float16 and op != "add":
        pytest.skip("half precision only adds")
    n = 21
    x = torch.randint(-50, 50, (8,)).to(dtype)
    where, value = torch.randint(0, 8, (n,), dtype=torch.int32), torch.randint(-50, 50, (n,)).to(dtype)
    expected, old = x.tolist(), torch.zeros(n, dtype=dtype)
    befores = []
    for place, v in zip(where.tolist(), value.tolist(), strict=True):
        befores.append(expected[place])
        expected[place] = OPERATIONS[op](expected[place], v)
    update[(1,)](x, where, value, old, n, OP=op, BLOCK=32)
    assert x.tolist() == expected
    if not (dtype.is_floating_point and op in ("max", "min")):  # Triton makes two operations of those
        assert old.tolist() == befores, "one lane after the other"


@pytest.mark.parametrize("sem", ["relaxed", "acquire", "release", "acq_rel"])
@pytest.mark.parametrize("scope", ["gpu", "cta", "sys"])
def test_contention(sem, scope, monkeypatch):
    @triton.jit
    def count(x, SEM: tl.constexpr, SCOPE: tl.constexpr):
        for _ in range(100):
            tl.atomic_add(x, 1, sem=SEM, scope=SCOPE)
            tl.atomic_add(x + 8, 0.5, sem=SEM, scope=SCOPE)

    monkeypatch.setenv("TRITON_EXT_NUM_THREADS", "4")
    x = torch.zeros(9, dtype=torch.float32)
    count[(200,)](x, SEM=sem, SCOPE=scope)
    assert x[0] == 20000 and x[8] == 10000


def test_compare_and_swap_as_a_lock(monkeypatch):
    @triton.jit
    def locked(lock, x):
        while tl.atomic_cas(lock, 0, 1, sem="acquire") != 0:
            pass
        tl.store(x, tl.load(x) + 1)
        tl.atomic_xchg(lock, 0, sem="release")

    monkeypatch.setenv("TRITON_EXT_NUM_THREADS", "4")
    lock, x = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    locked[(500,)](lock, x)
    assert x.item() == 500


def test_a_program_may_wait_for_one_that_began_before(monkeypatch):
    @triton.jit
    def chain(flags, out):
        pid = tl.program_id(0)
        if pid > 0:
            while tl.atomic_add(flags + pid - 1, 0, sem="acquire") == 0:
                pass
            tl.store(out + pid, tl.load(out + pid - 1) + pid)
        tl.atomic_xchg(flags + pid, 1, sem="release")

    for threads in ("1", "4"):
        monkeypatch.setenv("TRITON_EXT_NUM_THREADS", threads)
        flags, out = torch.zeros(50, dtype=torch.int32), torch.zeros(50, dtype=torch.int32)
        chain[(50,)](flags, out)
        assert out.tolist() == [sum(range(i + 1)) for i in range(50)]
