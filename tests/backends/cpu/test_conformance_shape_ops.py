"""Operations that move elements around, for elements of every type."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from conformance import ALL, name, values

N = 32


@triton.jit
def rearranged(x, y, out, N: tl.constexpr):
    """Results of 2 N elements, one after the other."""
    i, j = tl.arange(0, N), tl.arange(0, 2 * N)
    a, b = tl.load(x + i), tl.load(y + i)
    square = tl.reshape(a, [4, N // 4])
    tl.store(out + j, tl.cat(a, b))
    tl.store(out + 2 * N + j, tl.ravel(tl.cat(square, tl.reshape(b, [4, N // 4]), dim=1)))
    tl.store(out + 4 * N + j, tl.ravel(tl.join(a, b)))
    tl.store(out + 6 * N + j, tl.interleave(a, b))
    even, odd = tl.split(tl.reshape(a, [N // 2, 2]))
    tl.store(out + 8 * N + tl.arange(0, N // 2), even)
    tl.store(out + 8 * N + N // 2 + tl.arange(0, N // 2), odd)
    tl.store(out + 9 * N + i, tl.flip(a))
    tl.store(out + 10 * N + i, tl.ravel(tl.flip(square, 0)))
    tl.store(out + 11 * N + i, tl.ravel(tl.trans(square)))
    tl.store(out + 12 * N + i, tl.ravel(tl.permute(tl.reshape(a, [2, 4, N // 8]), [2, 0, 1])))
    tl.store(out + 13 * N + i, tl.ravel(tl.broadcast_to(tl.expand_dims(tl.load(x + tl.arange(0, 4)), 1), [4, N // 4])))
    tl.store(out + 14 * N + i, tl.squeeze(tl.unsqueeze(tl.unsqueeze(a, 0), 2), 2).reshape([N]))
    tl.store(out + 15 * N + i, tl.ravel(square[:, None, :].trans(1, 2, 0)))


@pytest.mark.parametrize("dtype", [*ALL, torch.bool], ids=name)
def test_rearrangements(dtype):
    if dtype == torch.bool:
        x, y = (torch.from_numpy(np.random.default_rng(seed).integers(0, 2, N) != 0) for seed in (1, 2))
    else:
        x, y = values(dtype, N, seed=1), values(dtype, N, seed=2)
    out = torch.zeros(16, N, dtype=dtype)
    rearranged[(1,)](x, y, out, N=N)
    # Bits are moved: torch has no such functions for all of these types.
    a, b = (t.view(getattr(torch, f"int{8 * t.itemsize}")) for t in (x, y))
    square = a.reshape(4, -1)
    parts = [
        a, b, torch.cat([square, b.reshape(4, -1)], 1), torch.stack([a, b], 1), torch.stack([a, b], 1), a[::2], a[1::2],
        a.flip(0), square.flip(0), square.T, a.reshape(2, 4, -1).permute(2, 0, 1), a[:4, None].expand(4, N // 4), a,
        square.T,
    ]  # fmt: skip
    expected = torch.cat([part.reshape(-1) for part in parts])
    assert torch.equal(out.view(a.dtype).flatten(), expected)


@triton.jit
def gathered(x, columns, rows, out, M: tl.constexpr, N: tl.constexpr):
    place = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    v = tl.load(x + place)
    tl.store(out + place, tl.gather(v, tl.load(columns + place), 1))
    tl.store(out + M * N + place, tl.gather(v, tl.load(rows + place), 0))


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=name)
@pytest.mark.parametrize("dtype", ALL, ids=name)
def test_gather(dtype, index):
    m, n = 4, 16
    x = values(dtype, m * n, seed=3).reshape(m, n)
    rng = np.random.default_rng(4)
    columns, rows = (torch.from_numpy(rng.integers(0, size, (m, n))).to(index) for size in (n, m))
    out = torch.zeros(2, m, n, dtype=dtype)
    gathered[(1,)](x, columns, rows, out, M=m, N=n)
    bits = x.view(getattr(torch, f"int{8 * x.itemsize}"))
    expected = torch.stack([torch.gather(bits, 1, columns.long()), torch.gather(bits, 0, rows.long())])
    assert torch.equal(out.view(bits.dtype), expected)


@triton.jit
def ordered(x, out, M: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, M * N)
    place = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    a = tl.load(x + i)
    tl.store(out + i, tl.sort(a))
    tl.store(out + M * N + i, tl.sort(a, descending=True))
    tl.store(out + 2 * M * N + place, tl.sort(tl.load(x + place)))
    tl.store(out + 3 * M * N + tl.arange(0, 4), tl.topk(a, 4))


@pytest.mark.parametrize("dtype", ALL, ids=name)
def test_sort_and_topk(dtype):
    m, n = 2, 16
    x = values(dtype, m * n, seed=5, edges=not dtype.is_floating_point)
    out = torch.zeros(4, m * n, dtype=dtype)
    ordered[(1,)](x, out, M=m, N=n)
    a = (x.double() if dtype.is_floating_point else x).numpy()
    whole = np.sort(a)
    parts = [whole, whole[::-1], np.sort(a.reshape(m, n)).ravel(), whole[::-1][:4]]
    found = (out.double() if dtype.is_floating_point else out).numpy()
    for row, part in zip(found, parts, strict=True):
        np.testing.assert_array_equal(row[: len(part)], part)


@triton.jit
def merged(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.bitonic_merge(tl.load(x + i)))
    tl.store(out + N + i, tl.bitonic_merge(tl.load(x + i), descending=True))


def test_bitonic_merge():
    x = torch.cat([torch.arange(16), torch.arange(40, 24, -1)]).float()
    out = torch.zeros(2, 32)
    merged[(1,)](x, out, N=32)
    assert torch.equal(out, torch.stack([x.sort().values, x.sort(descending=True).values]))


@triton.jit
def swizzled(out, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    k = tl.arange(0, ROWS * COLUMNS)
    i, j = tl.swizzle2d(k // COLUMNS, k % COLUMNS, ROWS, COLUMNS, GROUP)
    tl.store(out + k, i)
    tl.store(out + ROWS * COLUMNS + k, j)


@pytest.mark.parametrize(("rows", "columns", "group"), [(4, 4, 2), (8, 4, 2), (4, 8, 4), (2, 16, 2)])
def test_swizzle2d(rows, columns, group):
    """Column by column inside of a group of rows."""
    out = torch.zeros(2, rows * columns, dtype=torch.int32)
    swizzled[(1,)](out, ROWS=rows, COLUMNS=columns, GROUP=group)
    order = [(i, j) for first in range(0, rows, group) for j in range(columns) for i in range(first, first + group)]
    assert list(zip(*out.tolist(), strict=True)) == order


@triton.jit
def hinted(x, out, n, N: tl.constexpr):
    tl.assume(n >= 0)
    i = tl.max_contiguous(tl.multiple_of(tl.arange(0, N), N), N)
    i = tl.max_constancy(i, 1)
    tl.debug_barrier()
    v = tl.load(x + i, mask=i < n, other=-1.0, cache_modifier=".cg", eviction_policy="evict_last")
    tl.store(tl.multiple_of(out, 16) + i, v, cache_modifier=".wt", eviction_policy="evict_first")
    tl.store(out + N, tl.load(x, cache_modifier=".ca", volatile=True))


def test_hints_change_nothing():
    x, out = torch.randn(64), torch.zeros(65)
    hinted[(1,)](x, out, 50, N=64)
    assert torch.equal(out[:50], x[:50]) and (out[50:64] == -1).all() and out[64] == x[0]


@triton.jit
def indexed(x, out, M: tl.constexpr, N: tl.constexpr):
    i, j = tl.arange(0, M), tl.arange(0, N)
    v = tl.load(x + i[:, None] * N + j[None, :])
    row = tl.sum(tl.where(i[:, None] == 1, v, 0.0), 0)
    tl.store(out + i[:, None, None] * N + j[None, None, :], v[:, None, :] + row[None, None, :])


def test_indexing_with_none():
    x, out = torch.randn(4, 8), torch.zeros(4, 8)
    indexed[(1,)](x, out, M=4, N=8)
    assert torch.equal(out, x + x[1])


@triton.jit
def drawn(out, bits, seed, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.rand(seed, i))
    tl.store(out + N + i, tl.randn(seed, i))
    a, b, c, d = tl.rand4x(seed, i)
    tl.store(out + 2 * N + i, a + b + c + d)
    a, b, c, d = tl.randn4x(seed, i)
    tl.store(out + 3 * N + i, a + b + c + d)
    tl.store(bits + i, tl.randint(seed, i))
    a, b, c, d = tl.randint4x(seed, i)
    tl.store(bits + N + i, a)
    tl.store(bits + 2 * N + i, d)


def philox(seed, counter):
    """Ten rounds of Philox 4x32, from its definition."""
    c, key = [counter, 0, 0, 0], [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        first, second = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [
            (second >> 32) ^ c[1] ^ key[0], second & 0xFFFFFFFF, (first >> 32) ^ c[3] ^ key[1], first & 0xFFFFFFFF,
        ]  # fmt: skip
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def test_random_numbers():
    n, seed = 1024, 0x123456789
    out, bits = torch.zeros(4, n), torch.zeros(3, n, dtype=torch.int32)
    drawn[(1,)](out, bits, seed, N=n)
    expected = np.array([philox(seed, k) for k in range(n)], np.uint32).view(np.int32)
    assert bits.tolist() == [expected[:, k].tolist() for k in (0, 0, 3)]
    assert out[0].min() >= 0 and out[0].max() < 1 and abs(out[0].mean() - 0.5) < 0.04
    assert abs(out[1].mean()) < 0.15 and abs(out[1].std() - 1) < 0.1
    assert abs(out[2].mean() - 2) < 0.1 and abs(out[3].std() - 2) < 0.2
