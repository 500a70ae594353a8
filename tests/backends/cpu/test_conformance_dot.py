"""Products: every type of operand, batches, sizes down to one, accumulators, scales."""

from itertools import product as product_of

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from conformance import FP8, assert_same, name, numbers, of

E5, E4 = FP8
TYPES = [
    (E5, E5, torch.float32), (E5, E4, torch.float32), (E4, E5, torch.float16), (E4, E4, torch.float32),
    (torch.float16, torch.float16, torch.float32), (torch.float16, torch.float16, torch.float16),
    (torch.bfloat16, torch.bfloat16, torch.float32), (torch.float32, torch.float32, torch.float32),
    (torch.float64, torch.float64, torch.float64), (torch.int8, torch.int8, torch.int32),
]  # fmt: skip
SHAPES = [  # batch, rows, columns, depth
    (0, 1, 1, 1), (0, 1, 16, 4), (0, 16, 1, 8), (0, 2, 4, 1), (0, 16, 32, 64), (1, 4, 4, 2), (2, 8, 16, 8),
    (4, 1, 2, 16),
]  # fmt: skip


@triton.jit
def product(
    a, b, c, out, BATCH: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    OUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    left, right, place = m[:, None] * K + k[None, :], k[:, None] * N + n[None, :], m[:, None] * N + n[None, :]
    if BATCH:
        g = tl.arange(0, BATCH)[:, None, None]
        left, right, place = g * M * K + left[None], g * K * N + right[None], g * M * N + place[None]
    x, y = tl.load(a + left), tl.load(b + right)
    tl.store(out + place, tl.dot(x, y, out_dtype=OUT, input_precision=PRECISION))
    size: tl.constexpr = BATCH * M * N if BATCH else M * N
    tl.store(out + size + place, tl.dot(x, y, tl.load(c + place), out_dtype=OUT, input_precision=PRECISION))


def multiply(a, b, c, shape, precision=None):
    batch, rows, columns, depth = shape
    out = torch.zeros(2, *c.shape, dtype=c.dtype)
    kind = {torch.float16: tl.float16, torch.float32: tl.float32, torch.float64: tl.float64, torch.int32: tl.int32}
    product[(1,)](a, b, c, out, BATCH=batch, M=rows, N=columns, K=depth, OUT=kind[c.dtype], PRECISION=precision)
    return out


def integers(shape, dtype, seed):
    """Small integers, which every type holds and of which every sum is exact."""
    array = np.random.default_rng(seed).integers(-3, 4, shape)
    return of(array, dtype) if dtype.is_floating_point else torch.from_numpy(array).to(dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize("types", TYPES, ids=lambda types: "-".join(map(name, types)))
def test_types_and_shapes(types, shape):
    batch, rows, columns, depth = shape
    lead = (batch,) if batch else ()
    a, b = integers((*lead, rows, depth), types[0], 0), integers((*lead, depth, columns), types[1], 1)
    c = integers((*lead, rows, columns), types[2], 2)
    out = multiply(a, b, c, shape)
    wide = np.float64 if types[2].is_floating_point else np.int32
    exact = numbers(a).astype(wide) @ numbers(b).astype(wide)
    assert_same(out, np.stack([exact, exact + numbers(c)]))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64], ids=name)
def test_other_integers_are_refused(dtype):
    shape = (0, 4, 4, 4)
    a, b, c = (torch.ones(4, 4, dtype=kind) for kind in (dtype, dtype, torch.int32))
    with pytest.raises(triton.CompilationError, match=r"only int8 supported|Unsupported lhs dtype"):
        multiply(a, b, c, shape)


@pytest.mark.slow
@pytest.mark.parametrize("types", TYPES, ids=lambda types: "-".join(map(name, types)))
def test_every_combination_of_sizes(types):
    for shape in product_of((0, 2), (1, 2, 8, 32), (1, 4, 16, 64), (1, 2, 16, 128)):
        test_types_and_shapes(types, shape)


@pytest.mark.parametrize("precision", ["ieee", "tf32", "tf32x3", "bf16x3", "bf16x6"])
def test_every_precision_is_at_least_what_it_says(precision):
    """All of them compute in float32."""
    rng = np.random.default_rng(3)
    a, b, c = (torch.from_numpy(rng.normal(size=(32, 32)).astype(np.float32)) for _ in range(3))
    out = multiply(a, b, c, (0, 32, 32, 32), precision)
    torch.testing.assert_close(out[0].double(), a.double() @ b.double(), rtol=0, atol=1e-5)
    torch.testing.assert_close(out[1].double(), a.double() @ b.double() + c.double(), rtol=0, atol=1e-5)


@triton.jit
def turned(a, b, out, BATCH: tl.constexpr, M: tl.constexpr, K: tl.constexpr):
    g, m, k = tl.arange(0, BATCH)[:, None, None], tl.arange(0, M), tl.arange(0, K)
    x = tl.load(a + g * M * K + (m[:, None] * K + k[None, :])[None])
    y = tl.load(b + g * M * K + (m[:, None] * K + k[None, :])[None])
    total = tl.zeros((BATCH, M, M), tl.float32)
    for _ in range(3):
        total = tl.dot(x, tl.permute(y, (0, 2, 1)), total)
    tl.store(out + g * M * M + (m[:, None] * M + m[None, :])[None], total)


def test_batches_of_transposed_operands_in_a_loop():
    a, b = integers((4, 16, 8), torch.float32, 4), integers((4, 16, 8), torch.float32, 5)
    out = torch.zeros(4, 16, 16)
    turned[(1,)](a, b, out, BATCH=4, M=16, K=8)
    assert torch.equal(out, 3 * (a @ b.transpose(1, 2)))


@triton.jit
def scaled_product(
    a, b, scale_a, scale_b, c, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, GROUP: tl.constexpr, PACK_A: tl.constexpr, PACK_B: tl.constexpr,
):  # fmt: skip
    m, n, s = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K // GROUP)
    rows: tl.constexpr = M // 2 if LEFT == "e2m1" and not PACK_A else M
    deep: tl.constexpr = K // 2 if LEFT == "e2m1" and PACK_A else K
    high: tl.constexpr = K // 2 if RIGHT == "e2m1" and PACK_B else K
    columns: tl.constexpr = N // 2 if RIGHT == "e2m1" and not PACK_B else N
    x = tl.load(a + tl.arange(0, rows)[:, None] * deep + tl.arange(0, deep)[None, :])
    y = tl.load(b + tl.arange(0, high)[:, None] * columns + tl.arange(0, columns)[None, :])
    left = None if scale_a is None else tl.load(scale_a + m[:, None] * (K // GROUP) + s[None, :])
    right = None if scale_b is None else tl.load(scale_b + n[:, None] * (K // GROUP) + s[None, :])
    place = m[:, None] * N + n[None, :]
    total = tl.dot_scaled(
        x, left, LEFT, y, right, RIGHT, tl.load(c + place), lhs_k_pack=PACK_A, rhs_k_pack=PACK_B
    )  # fmt: skip
    tl.store(out + place, total)


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
ELEMENTS = {"e5m2": E5, "e4m3": E4, "bf16": torch.bfloat16, "fp16": torch.float16}


def operand(kind, shape, packed_axis, seed):
    """(tensor as the kernel takes it, its values)"""
    if kind != "e2m1":
        tensor = integers(shape, ELEMENTS[kind], seed)
        return tensor, numbers(tensor)
    codes = np.random.default_rng(seed).integers(0, 16, shape).astype(np.uint8)
    low, high = (np.take(codes, range(i, shape[packed_axis], 2), packed_axis) for i in (0, 1))
    return torch.from_numpy(low | high << 4), E2M1[codes]


@pytest.mark.parametrize(
    ("left", "right", "with_left", "with_right", "pack"),
    [
        ("e2m1", "e2m1", True, True, True), ("e2m1", "e2m1", True, True, False), ("e4m3", "e5m2", True, True, True),
        ("e4m3", "e2m1", True, True, True), ("bf16", "e4m3", False, True, True), ("bf16", "e2m1", False, True, False),
        ("e5m2", "bf16", True, False, True), ("fp16", "e2m1", False, True, True), ("e4m3", "e4m3", True, True, True),
    ],
)  # fmt: skip
def test_scaled(left, right, with_left, with_right, pack):
    m, n, k, group = 16, 32, 64, 32
    a, x = operand(left, (m, k), 1 if pack else 0, 6)
    b, y = operand(right, (k, n), 0 if pack else 1, 7)
    rng = np.random.default_rng(8)
    scale_a, scale_b = (rng.integers(124, 131, (size, k // group)).astype(np.uint8) for size in (m, n))
    c = integers((m, n), torch.float32, 9)
    out = torch.zeros(m, n)
    factors = [torch.from_numpy(s) if given else None for s, given in ((scale_a, with_left), (scale_b, with_right))]
    packs = [pack or kind != "e2m1" for kind in (left, right)]
    scaled_product[(1,)](
        a, b, *factors, c, out,
        M=m, N=n, K=k, LEFT=left, RIGHT=right, GROUP=group, PACK_A=packs[0], PACK_B=packs[1],
    )  # fmt: skip
    if with_left:
        x = x * np.exp2(np.repeat(scale_a, group, 1) - 127.0)
    if with_right:
        y = y * np.exp2(np.repeat(scale_b.T, group, 0) - 127.0)
    assert_same(out, x @ y + numbers(c))


def test_extreme_scales():
    """The smallest one is a subnormal number, 255 is NaN."""
    m = n = 16
    a, b = torch.full((m, 32), 4.0).to(E4), torch.full((32, n), 2.0).to(E4)
    scale = torch.tensor([[0], [1], [254], [255]] * 4, dtype=torch.uint8)
    out = torch.zeros(m, n)
    scaled_product[(1,)](
        a, b, scale, None, torch.zeros(m, n), out,
        M=m, N=n, K=32, LEFT="e4m3", RIGHT="e4m3", GROUP=32, PACK_A=True, PACK_B=True,
    )  # fmt: skip
    expected = 256 * np.exp2(np.array([-127.0, -126.0, 127.0, np.nan] * 4))
    expected[2::4] = np.inf
    assert_same(out, np.repeat(expected[:, None], n, 1))


def test_scales_of_nvfp4():
    """Sixteen elements share a scale that is an fp8e4nv itself."""
    m, n, k, group = 16, 16, 64, 16
    a, x = operand("e2m1", (m, k), 1, 10)
    b, y = operand("e2m1", (k, n), 0, 11)
    scale_a, scale_b = (integers((size, k // group), E4, seed) for size, seed in ((m, 12), (n, 13)))
    out = torch.zeros(m, n)
    scaled_product[(1,)](
        a, b, scale_a, scale_b, torch.zeros(m, n), out,
        M=m, N=n, K=k, LEFT="e2m1", RIGHT="e2m1", GROUP=group, PACK_A=True, PACK_B=True,
    )  # fmt: skip
    x = x * np.repeat(numbers(scale_a), group, 1)
    y = y * np.repeat(numbers(scale_b).T, group, 0)
    assert_same(out, x @ y)
