"""The kernels of examples/triton at sizes, types and blocks that the programs do not show."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

PROGRAMS = Path(__file__).parents[1] / "examples" / "triton"
TYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def program(name: str) -> ModuleType:
    """An example as a module. It imports its neighbour, as a program in that folder does."""
    path = PROGRAMS / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"example_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(PROGRAMS))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(PROGRAMS))
    return module


def assert_close(result: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, factor: float = 1.0) -> None:
    """expected: computed in double precision; the error is relative to its size."""
    assert result.dtype == dtype
    error = (result.double() - expected).abs().max() / expected.abs().max().clamp(min=1)
    assert error.item() < factor * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("count, width", [(1, 16), (1000, 64), (4097, 4096), (8192, 1024)])
def test_vector_add(count, width, dtype):
    left, right = torch.randn(2, count).to(dtype)
    assert torch.equal(program("01_vector_add").add(left, right, width), left + right)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rows, columns, programs", [(1, 1, 1), (7, 33, 3), (100, 781, 8), (64, 1024, 1000)])
def test_softmax(rows, columns, programs, dtype):
    wide = (5 * torch.randn(rows, columns + 3)).to(dtype)
    scores = wide[:, :columns]  # rows that are further apart than they are long
    result = program("02_fused_softmax").softmax(scores, programs)
    assert_close(result, torch.softmax(scores.double(), 1), dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("m, n, k", [(1, 1, 1), (64, 64, 64), (130, 70, 33), (31, 200, 129)])
@pytest.mark.parametrize("blocks", [(16, 16, 16), (32, 64, 16), (128, 64, 32)])
def test_matmul(m, n, k, blocks, dtype):
    a, b = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype).T
    sizes = dict(zip(("BM", "BN", "BK"), blocks, strict=True))
    example = program("03_matmul")
    expected = a.double() @ b.double()
    assert_close(example.matmul(a, b, blocks=sizes, band=2), expected, dtype)
    activated = F.leaky_relu(expected, example.SLOPE)
    assert_close(example.matmul(a, b, activate=True, blocks=sizes), activated, dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("chance", [0.0, 0.25, 0.9])
def test_dropout(chance, dtype):
    dropout = program("04_dropout").dropout
    x = (torch.rand(20_011) + 1).to(dtype).requires_grad_()
    result = dropout(x, chance, 7)
    kept = result != 0
    assert abs(kept.double().mean().item() - (1 - chance)) < 0.015
    assert_close(result, x.double() * kept / (1 - chance), dtype)
    gradient = torch.randn_like(x)
    result.backward(gradient)
    assert_close(x.grad, gradient.double() * kept / (1 - chance), dtype)
    assert torch.equal(dropout(x, chance, 8) != 0, kept) == (chance == 0)


def test_dropout_does_not_depend_on_blocks():
    masked, x = program("04_dropout").masked, torch.ones(5001)
    assert torch.equal(masked(x, 0.5, 3, width=64), masked(x, 0.5, 3, width=2048))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (37, 100), (4, 9, 64), (70, 257)])
def test_layer_norm(shape, dtype):
    columns = shape[-1]
    given = [(torch.randn(shape) * 2 + 1).to(dtype), *torch.randn(2, columns).to(dtype)]
    ours = [x.clone().requires_grad_() for x in given]
    exact = [x.double().requires_grad_() for x in given]
    gradient = torch.randn(shape).to(dtype)
    y = program("05_layer_norm").layer_norm(*ours)
    expected = F.layer_norm(exact[0], (columns,), *exact[1:])
    assert_close(y, expected, dtype)
    y.backward(gradient)
    expected.backward(gradient.double())
    for one, other in zip(ours, exact, strict=True):
        assert_close(one.grad, other.grad, dtype, factor=5)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "length, size, blocks", [(1, 16, (16, 16)), (64, 32, (32, 32)), (77, 64, (32, 16)), (130, 16, (16, 64))]
)
def test_attention(length, size, blocks, causal, dtype):
    given = [torch.randn(2, 2, length, size).to(dtype) for _ in range(3)]
    ours = [x.clone().requires_grad_() for x in given]
    exact = [x.double().requires_grad_() for x in given]
    gradient = torch.randn(2, 2, length, size).to(dtype)
    result = program("06_attention").attention(*ours, causal, dict(zip(("BQ", "BK"), blocks, strict=True)))
    expected = F.scaled_dot_product_attention(*exact, is_causal=causal)
    assert_close(result, expected, dtype)
    result.backward(gradient)
    expected.backward(gradient.double())
    for one, other in zip(ours, exact, strict=True):
        assert_close(one.grad, other.grad, dtype, factor=2)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("blocks, programs", [((16, 16, 16), 1), ((32, 64, 16), 5), ((64, 32, 32), 100)])
def test_grouped_matmul(blocks, programs, dtype):
    shapes = [(64, 64, 64), (1, 7, 3), (100, 33, 50), (17, 130, 1)]
    left = [torch.randn(m, k).to(dtype) for m, _, k in shapes]
    right = [torch.randn(k, n).to(dtype) for _, n, k in shapes]
    sizes = dict(zip(("BM", "BN", "BK"), blocks, strict=True))
    results = program("07_grouped_gemm").grouped_matmul(left, right, sizes, programs)
    for a, b, c in zip(left, right, results, strict=True):
        assert_close(c, a.double() @ b.double(), dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("m, n, k", [(64, 64, 64), (130, 72, 40), (31, 200, 128)])
@pytest.mark.parametrize("blocks, programs", [((16, 16, 16), 1), ((32, 64, 16), 3), ((128, 64, 32), 100)])
def test_persistent_matmul(m, n, k, blocks, programs, dtype):
    a, b = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype)
    sizes = dict(zip(("BM", "BN", "BK"), blocks, strict=True))
    assert_close(
        program("08_persistent_matmul").persistent_matmul(a, b, sizes, programs), a.double() @ b.double(), dtype
    )
