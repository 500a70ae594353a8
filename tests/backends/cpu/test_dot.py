"""`tl.dot` on the CPU: shapes, types, accumulators, operands that are not plain loads."""

import pytest
import torch
import triton
import triton.language as tl

from triton_ext.backends.cpu.codegen import native

SIZES = [1, 2, 4, 8, 16, 32, 64]


@triton.jit
def product(a, b, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, m, n, k, ACC: tl.constexpr, OUT: tl.constexpr,
            TRANSPOSED: tl.constexpr):  # fmt: skip
    """c[m, n] (+)= a[m, k] @ b[k, n], in one tile; TRANSPOSED: b is [n, k]."""
    i, j, d = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    x = tl.load(a + i[:, None] * k + d[None, :], mask=(i < m)[:, None] & (d < k)[None, :], other=0)
    if TRANSPOSED:
        y = tl.load(b + j[:, None] * k + d[None, :], mask=(j < n)[:, None] & (d < k)[None, :], other=0).trans()
    else:
        y = tl.load(b + d[:, None] * n + j[None, :], mask=(d < k)[:, None] & (j < n)[None, :], other=0)
    inside = (i < m)[:, None] & (j < n)[None, :]
    place = c + i[:, None] * n + j[None, :]
    total = tl.load(place, mask=inside, other=0) if ACC else tl.zeros([M, N], OUT)
    total = tl.dot(x, y, total, out_dtype=OUT)
    tl.store(place, total, mask=inside)


def power(size):
    return max(1, triton.next_power_of_2(size))


def check(m, n, k, dtype=torch.float32, acc=False, transposed=False, out=torch.float32, tolerance=1e-5, **options):
    torch.manual_seed(m * 10000 + n * 100 + k)
    if dtype.is_floating_point:
        a, b = torch.randn(m, k).to(dtype), torch.randn(n, k) if transposed else torch.randn(k, n)
        b = b.to(dtype)
    else:
        a = torch.randint(-100, 100, (m, k), dtype=dtype)
        b = torch.randint(-100, 100, (n, k) if transposed else (k, n), dtype=dtype)
    c = torch.randn(m, n).to(out) if out.is_floating_point else torch.randint(-100, 100, (m, n), dtype=out)
    wide = torch.float64 if out.is_floating_point else torch.int64
    expected = a.to(wide) @ (b.T if transposed else b).to(wide) + (c.to(wide) if acc else 0)
    out_type = getattr(tl, str(out).removeprefix("torch."))
    kernel = product[(1,)](a, b, c, power(m), power(n), power(k), m, n, k, acc, out_type, transposed, **options)
    error = (c.to(wide) - expected).abs().max().item()
    assert error <= tolerance * max(1, expected.abs().max().item())
    return kernel


@pytest.mark.parametrize("m", SIZES)
@pytest.mark.parametrize("n", SIZES)
def test_shapes(m, n):
    for k in (1, 8, 64):
        check(m, n, k)


@pytest.mark.parametrize("size", [3, 5, 7, 11, 13, 17, 31, 33])
def test_masked_shapes(size):
    check(size, size + 2, size + 5)
    check(size + 5, size, 3, acc=True)


@pytest.mark.parametrize("n", [1, 2, 8, 16, 64])
@pytest.mark.parametrize("k", [1, 4, 8, 32])
def test_transposed_shapes(n, k):
    """Blocks of every size that packing may turn in registers, whole and cut off by the mask."""
    check(8, n, k, transposed=True)
    check(3, max(1, n - 1), max(1, k - 1), transposed=True)


@triton.jit
def both_transposed(a, b, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """c = a.T @ b.T of a computed operand each: a is [K, M], b is [N, K]."""
    i, j, d = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    x = tl.load(a + d[:, None] * M + i[None, :]) * 2.0
    y = (tl.load(b + j[:, None] * K + d[None, :]) + d[None, :]).to(x.dtype)
    tl.store(c + i[:, None] * N + j[None, :], tl.dot(x.trans(), y.trans()))


@pytest.mark.parametrize("shape", [(16, 32, 64), (64, 16, 4), (4, 64, 32)])
def test_transposed_operands_that_are_computed(shape):
    m, n, k = shape
    a, b, c = torch.randn(k, m), torch.randn(n, k), torch.empty(m, n)
    both_transposed[(1,)](a, b, c, M=m, N=n, K=k)
    expected = 2 * a.double().T @ (b.double() + torch.arange(k)).T
    torch.testing.assert_close(c.double(), expected, rtol=0, atol=1e-6 * expected.abs().max().item() * k)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("dtype", "out", "tolerance"),
    [
        (torch.float32, torch.float32, 1e-5),
        (torch.float16, torch.float32, 1e-5),
        (torch.bfloat16, torch.float32, 1e-5),
        (torch.float16, torch.float16, 2e-3),
        (torch.float64, torch.float64, 1e-12),
        (torch.int8, torch.int32, 0),
    ],
)
def test_types(dtype, out, tolerance, transposed):
    for acc in (False, True):
        check(24, 40, 20, dtype, acc, transposed, out, tolerance)


@triton.jit
def looped(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PLUS: tl.constexpr):
    """A tiled product whose edges wrap around, in groups of four rows of tiles."""
    tiles_n = tl.cdiv(N, BN)
    group = tl.program_id(0) // (4 * tiles_n)
    height = tl.minimum(tl.cdiv(M, BM) - group * 4, 4)
    tile_m = group * 4 + tl.program_id(0) % (4 * tiles_n) % height
    tile_n = tl.program_id(0) % (4 * tiles_n) // height
    rows, columns = (tile_m * BM + tl.arange(0, BM)) % M, (tile_n * BN + tl.arange(0, BN)) % N
    depth = tl.arange(0, BK)
    x, y = a + rows[:, None] * K + depth[None, :], b + depth[:, None] * N + columns[None, :]
    total = tl.zeros([BM, BN], tl.float32)
    for k in range(0, tl.cdiv(K, BK)):
        left = tl.load(x, mask=depth[None, :] < K - k * BK, other=0.0)
        right = tl.load(y, mask=depth[:, None] < K - k * BK, other=0.0)
        if PLUS:
            total += tl.dot(left, right)
        else:
            total = tl.dot(left, right, total)
        x += BK
        y += BK * N
    total = tl.where(total > 0, total, 0.5 * total)
    i, j = tile_m * BM + tl.arange(0, BM), tile_n * BN + tl.arange(0, BN)
    tl.store(c + i[:, None] * N + j[None, :], total, mask=(i < M)[:, None] & (j < N)[None, :])


@pytest.mark.parametrize("plus", [False, True])
@pytest.mark.parametrize("threads", ["1", "4"])
@pytest.mark.parametrize("shape", [(64, 64, 64), (100, 77, 51), (33, 130, 200), (1, 64, 40)])
def test_a_whole_product(shape, threads, plus, monkeypatch):
    monkeypatch.setenv("TRITON_EXT_NUM_THREADS", threads)
    m, n, k = shape
    a, b, c = torch.randn(m, k), torch.randn(k, n), torch.empty(m, n)
    looped[(triton.cdiv(m, 32) * triton.cdiv(n, 64),)](a, b, c, m, n, k, BM=32, BN=64, BK=16, PLUS=plus)
    expected = torch.nn.functional.leaky_relu(a.double() @ b.double(), 0.5)
    torch.testing.assert_close(c.double(), expected, rtol=0, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize("plus", [False, True])
def test_a_carried_accumulator_stays_in_place(plus):
    """There is memory for one accumulator and the packed operands, and none for a copy."""
    m, n, k = 32, 64, 16
    a, b, c = torch.randn(m, k), torch.randn(k, n), torch.empty(m, n)
    kernel = looped[(1,)](a, b, c, m, n, k, BM=m, BN=n, BK=k, PLUS=plus)
    assert kernel.metadata.scratch_bytes <= 4 * (m * n + m * k + k * n)


@triton.jit
def chained(a, b, c, out, S: tl.constexpr):
    """out = relu(a @ b) @ c + a @ b: the first product is wanted twice."""
    i, j = tl.arange(0, S)[:, None], tl.arange(0, S)[None, :]
    first = tl.dot(tl.load(a + i * S + j), tl.load(b + i * S + j))
    second = tl.dot(tl.maximum(first, 0.0), tl.load(c + i * S + j), first)
    tl.store(out + i * S + j, second + first)


def test_products_of_products():
    a, b, c = (torch.randn(32, 32) for _ in range(3))
    out = torch.empty(32, 32)
    chained[(1,)](a, b, c, out, S=32)
    first = a.double() @ b.double()
    torch.testing.assert_close(out.double(), first.relu() @ c.double() + 2 * first, rtol=0, atol=1e-3)


@triton.jit
def accumulator_from_outside(a, b, c, out, n, S: tl.constexpr, WHILE: tl.constexpr):
    """out[t] = c[t] @ b + a @ b: every round of the loop starts from the same accumulator."""
    place = tl.arange(0, S)[:, None] * S + tl.arange(0, S)[None, :]
    y = tl.load(b + place)
    first = tl.dot(tl.load(a + place), y)
    if WHILE:
        t = 0
        while t < n:
            tl.store(out + t * S * S + place, tl.dot(tl.load(c + t * S * S + place), y, first))
            t += 1
    else:
        for t in range(n):
            tl.store(out + t * S * S + place, tl.dot(tl.load(c + t * S * S + place), y, first))


@pytest.mark.parametrize("loop", ["for", "while"])
@pytest.mark.parametrize("size", [16, 64])
def test_a_loop_keeps_an_accumulator_from_outside(size, loop):
    a, b, c = torch.randn(size, size), torch.randn(size, size), torch.randn(3, size, size)
    out = torch.empty(3, size, size)
    accumulator_from_outside[(1,)](a, b, c, out, 3, S=size, WHILE=loop == "while")
    torch.testing.assert_close(out.double(), (c.double() + a.double()) @ b.double(), rtol=0, atol=1e-3)


@triton.jit
def attention(q, k, v, out, n, scale, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr):
    """One head, rows of M: what is summed so far is scaled before each product is added."""
    rows, columns, d = tl.program_id(0) * M + tl.arange(0, M), tl.arange(0, N), tl.arange(0, D)
    x = tl.load(q + rows[:, None] * D + d[None, :])
    largest, weight = tl.full([M], -float("inf"), tl.float32), tl.zeros([M], tl.float32)
    total = tl.zeros([M, D], tl.float32)
    for start in range(0, n, N):
        inside = start + columns < n
        place = (start + columns)[:, None] * D + d[None, :]
        y = tl.load(k + place, mask=inside[:, None], other=0.0)
        z = tl.load(v + place, mask=inside[:, None], other=0.0)
        scores = tl.where(inside[None, :], tl.dot(x, y.trans()) * scale, -float("inf"))
        following = tl.maximum(largest, tl.max(scores, 1))
        p, shrink = tl.exp(scores - following[:, None]), tl.exp(largest - following)
        weight = weight * shrink + tl.sum(p, 1)
        total = tl.dot(p.to(z.dtype), z, total * shrink[:, None])
        largest = following
    tl.store(out + rows[:, None] * D + d[None, :], total / weight[:, None])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 2e-3)])
def test_attention(dtype, tolerance):
    n, dim = 50, 32
    q, k, v = torch.randn(32, dim).to(dtype), torch.randn(n, dim).to(dtype), torch.randn(n, dim).to(dtype)
    out = torch.empty(32, dim)
    attention[(2,)](q, k, v, out, n, dim**-0.5, M=16, N=16, D=dim)
    expected = (q.double() @ k.double().T * dim**-0.5).softmax(1) @ v.double()
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=tolerance)


@triton.jit
def accumulators_wanted_again(a, b, out, n, S: tl.constexpr):
    """Accumulators that are computed from tiles which are needed afterwards, and one that is not."""
    place = tl.arange(0, S)[:, None] * S + tl.arange(0, S)[None, :]
    x, y = tl.load(a + place), tl.load(b + place)
    product = tl.dot(x, y)
    carried = product
    for _ in range(n):
        scaled = carried * 0.5
        kept = tl.dot(x, y, scaled)
        alone = tl.dot(x, y, tl.dot(x, y) + 1.0)
        carried = tl.dot(x, y, product * 0.25) + scaled + kept + alone
    tl.store(out + place, carried - product)


@pytest.mark.parametrize("size", [8, 64])
def test_accumulators_that_are_wanted_again(size):
    a, b, out = torch.randn(size, size), torch.randn(size, size), torch.empty(size, size)
    accumulators_wanted_again[(1,)](a, b, out, 3, S=size)
    product = carried = a.double() @ b.double()
    for _ in range(3):
        carried = (1.25 * product) + 0.5 * carried + (product + 0.5 * carried) + (2 * product + 1)
    torch.testing.assert_close(out.double(), carried - product, rtol=1e-4, atol=1e-2)


def test_nan_and_inf_pass_through():
    a, b, c = torch.randn(16, 16), torch.randn(16, 16), torch.empty(16, 16)
    a[3, 2], b[5, 7] = float("nan"), float("inf")
    product[(1,)](a, b, c, 16, 16, 16, 16, 16, 16, False, tl.float32, False)
    expected = a @ b
    assert torch.equal(c.isnan(), expected.isnan())
    assert torch.equal(c.isinf(), expected.isinf())


# Both ways to multiply bfloat16: pairs in the processor's own instruction, and widened to float32.
native_or_widened = pytest.mark.parametrize(
    "native_bf16",
    [
        pytest.param(
            True, marks=pytest.mark.skipif(not native.host_vectors().bf16_dot, reason="needs a CPU with AVX512-BF16")
        ),
        False,
    ],
)


@native_or_widened
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("m", [1, 24])
def test_bfloat16(native_bf16, transposed, m):
    """Depths and widths of every kind, odd ones as well, whose last pair is half masked."""
    for n in (1, 3, 8, 31, 64):
        for k in (1, 2, 7, 20, 129):
            check(m, n, k, torch.bfloat16, acc=k > 2, transposed=transposed, bf16_dot=native_bf16)


@native_or_widened
def test_the_instruction_for_bfloat16_is_chosen_by_the_option(native_bf16):
    kernel = check(16, 32, 64, torch.bfloat16, bf16_dot=native_bf16)
    assert ("dpbf16ps" in kernel.asm["llir"]) == native_bf16


@native_or_widened
@pytest.mark.parametrize("shape", [(16, 32, 64), (64, 16, 4), (4, 64, 32)])
def test_transposed_bfloat16_operands_that_are_computed(native_bf16, shape):
    m, n, k = shape
    a, b, c = torch.randn(k, m).bfloat16(), torch.randint(-9, 9, (n, k)).bfloat16(), torch.empty(m, n)
    both_transposed[(1,)](a, b, c, M=m, N=n, K=k, bf16_dot=native_bf16)
    expected = 2 * a.double().T @ (b.double() + torch.arange(k)).T
    torch.testing.assert_close(c.double(), expected, rtol=0, atol=1e-5 * expected.abs().max().item())


@triton.jit
def batched(a, b, c, B: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """c[i] = a[i] @ b[i].T; a is [B, M, K], b is [B, N, K]."""
    i, j = tl.arange(0, B)[:, None, None], tl.arange(0, M)[None, :, None]
    columns, depth = tl.arange(0, N)[None, :, None], tl.arange(0, K)[None, None, :]
    x, y = tl.load(a + (i * M + j) * K + depth), tl.load(b + (i * N + columns) * K + depth)
    out = c + (i * M + j) * N + tl.arange(0, N)[None, None, :]
    tl.store(out, tl.dot(x, y.permute(0, 2, 1)))


@native_or_widened
@pytest.mark.parametrize("shape", [(1, 16, 16, 16), (2, 4, 32, 64), (4, 32, 8, 2)])
def test_batched_bfloat16(native_bf16, shape):
    size, m, n, k = shape
    a, b, c = torch.randn(size, m, k).bfloat16(), torch.randn(size, n, k).bfloat16(), torch.empty(size, m, n)
    batched[(1,)](a, b, c, B=size, M=m, N=n, K=k, bf16_dot=native_bf16)
    torch.testing.assert_close(c.double(), a.double() @ b.double().mT, rtol=0, atol=1e-4)


@native_or_widened
@pytest.mark.parametrize("shape", [(64, 64, 64), (100, 77, 51), (33, 130, 200), (1, 64, 40)])
def test_a_whole_product_of_bfloat16(native_bf16, shape):
    m, n, k = shape
    a, b, c = torch.randn(m, k).bfloat16(), torch.randn(k, n).bfloat16(), torch.empty(m, n)
    grid = (triton.cdiv(m, 32) * triton.cdiv(n, 64),)
    looped[grid](a, b, c, m, n, k, BM=32, BN=64, BK=16, PLUS=False, bf16_dot=native_bf16)
    expected = torch.nn.functional.leaky_relu(a.double() @ b.double(), 0.5)
    torch.testing.assert_close(c.double(), expected, rtol=0, atol=1e-5 * expected.abs().max().item())
