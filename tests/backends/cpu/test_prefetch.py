"""Loops that read rows through loaded indices: the rows are asked for ahead, and nothing else is read for that."""

import ctypes
import mmap

import pytest
import torch
import triton
import triton.language as tl


@triton.jit
def sum_rows(table, indices, out, first, last, STEP: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr):
    """out: the sum of two rows per step, which `indices` names."""
    columns, lanes = tl.arange(0, D), tl.arange(0, 2)
    total = tl.zeros((2, D), tl.float32)
    for i in range(first, last, STEP):
        if MASKED:
            row = tl.load(indices + 2 * i + lanes, mask=i < last - STEP, other=0)
        else:
            row = tl.load(indices + 2 * i + lanes)
        total += tl.load(table + row[:, None] * D + columns[None, :])
    tl.store(out + lanes[:, None] * D + columns[None, :], total)


@triton.jit
def walk(table, links, out, n, D: tl.constexpr):
    """Each row names the next: its address is not known ahead."""
    columns, lanes = tl.arange(0, D), tl.arange(0, 2)
    row = lanes.to(tl.int64)
    total = tl.zeros((2, D), tl.float32)
    for _ in range(n):
        total += tl.load(table + row[:, None] * D + columns[None, :])
        row = tl.load(links + row)
    tl.store(out + lanes[:, None] * D + columns[None, :], total)


def llvm(kernel, *args, **constants):
    return kernel.warmup(*args, **constants, grid=(1,)).asm["llir"]


@pytest.mark.parametrize(
    "first, last, step", [(0, 0, 1), (5, 3, 1), (0, 1, 1), (0, 12, 1), (3, 40, 1), (0, 40, 3), (1, 39, 7)]
)
@pytest.mark.parametrize("masked", [False, True])
def test_sums(first, last, step, masked):
    table, indices = torch.randn(50, 32), torch.randint(0, 50, (80,))
    out = torch.empty(2, 32)
    sum_rows[(1,)](table, indices, out, first, last, STEP=step, D=32, MASKED=masked)
    expected = torch.zeros(2, 32)
    for i in range(first, last, step):
        inside = not masked or i < last - step
        expected += table[indices[2 * i : 2 * i + 2] if inside else torch.tensor([0, 0])]
    torch.testing.assert_close(out, expected)


def test_rows_that_indices_name_are_asked_for():
    text = llvm(sum_rows, torch.ones(4, 32), torch.zeros(8, dtype=torch.int64), torch.ones(2, 32), 0, 4,
                STEP=1, D=32, MASKED=False)  # fmt: skip
    assert "llvm.prefetch" in text


def test_rows_that_rows_name_are_not():
    text = llvm(walk, torch.ones(4, 32), torch.zeros(8, dtype=torch.int64), torch.ones(2, 32), 4, D=32)
    assert "llvm.prefetch" not in text
    links = torch.tensor([1, 2, 3, 0])
    table, out = torch.randn(4, 32), torch.empty(2, 32)
    walk[(1,)](table, links, out, 4, D=32)
    torch.testing.assert_close(out, table.sum(0).expand(2, 32))


@pytest.mark.parametrize("count", [1, 11, 12, 13, 40])
def test_no_index_is_read_behind_the_last(count):
    """The indices end where a page that must not be touched begins."""
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 2 * page)
    whole = torch.frombuffer(memory, dtype=torch.int64)
    indices = whole[page // 8 - 2 * count : page // 8]
    indices.copy_(torch.arange(2 * count) % 50)
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    guard = whole.data_ptr() + page
    assert protect(guard, page, 0) == 0
    try:
        table, out = torch.randn(50, 32), torch.empty(2, 32)
        sum_rows[(1,)](table, indices, out, 0, count, STEP=1, D=32, MASKED=False)
        torch.testing.assert_close(out, table[indices].view(count, 2, 32).sum(0))
    finally:
        assert protect(guard, page, mmap.PROT_READ | mmap.PROT_WRITE) == 0
