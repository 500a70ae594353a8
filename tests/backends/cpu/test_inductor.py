"""Inductor's Triton code generator on the CPU: what it launches is this backend's, and equals eager."""

import subprocess
import sys

import pytest
import torch
import torch._inductor.config as inductor
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor import cpp_builder, exc
from torch._inductor.utils import fresh_cache, run_and_get_code

from triton_ext.backends.cpu.driver import CPULauncher


@pytest.fixture(autouse=True)
def through_triton(monkeypatch):
    """Fresh caches, and the launches of the test's kernels, counted."""
    launches = []
    launch = CPULauncher.__call__

    def counted(self, *args):
        launches.append(self)
        launch(self, *args)

    monkeypatch.setattr(CPULauncher, "__call__", counted)
    torch._dynamo.reset()
    torch.manual_seed(0)
    with fresh_cache(), inductor.patch(cpu_backend="triton", compile_threads=1):
        yield launches
    torch._dynamo.reset()


def check(function, *inputs, grad=False, library=False, **tolerance):
    """Compiled and eager agree; only Triton kernels are generated. `library`: some of the work is ATen's."""
    eager_inputs = [x.detach().clone().requires_grad_(grad and x.is_floating_point()) for x in inputs]
    inputs = [x.detach().clone().requires_grad_(grad and x.is_floating_point()) for x in inputs]

    def run(function, inputs):
        result = function(*inputs)
        if grad:
            weights = torch.linspace(0.5, 1.5, result.numel(), dtype=result.dtype).view(result.shape)
            (result * weights).sum().backward()
        return result

    compiled = torch.compile(function, fullgraph=True)
    result, sources = run_and_get_code(run, compiled, inputs)
    source = "\n".join(sources)
    assert "@triton.jit" in source
    assert "cpp_pybinding" not in source
    if not library:
        assert "extern_kernels." not in source
    expected = run(function, eager_inputs)
    torch.testing.assert_close(result, expected, **tolerance)
    for got, wanted in zip(inputs, eager_inputs, strict=True):
        if wanted.grad is not None:
            torch.testing.assert_close(got.grad, wanted.grad, **tolerance)


DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
]  # fmt: skip
FLOATS = DTYPES[6:]
NAMES = {"ids": str}


@pytest.mark.parametrize("dtype", DTYPES, **NAMES)
def test_types(dtype, through_triton):
    x = torch.randint(0, 100, (16, 96)).to(dtype)

    def function(x):
        return x + x, x * x, x > 1, x.to(torch.float32) * 0.5, torch.where(x > 1, x, x + 1), x.sum(1), x.amax(1)

    check(function, x)
    assert through_triton


X, Y = torch.randn(16, 96, generator=torch.Generator().manual_seed(0)), torch.linspace(0.1, 0.9, 1536).view(16, 96)
WHERE = torch.randint(0, 96, (16, 96), generator=torch.Generator().manual_seed(1))
ROWS = torch.randint(0, 16, (40,), generator=torch.Generator().manual_seed(2))

FORWARD = {
    "softmax": lambda x: torch.softmax(x, -1),
    "log_softmax": lambda x: torch.log_softmax(x, 0),
    "layer_norm": lambda x: F.layer_norm(x, (96,)),
    "var_mean": lambda x: torch.var_mean(x, -1),
    "std of columns": lambda x: x.std(0),
    "cumsum": lambda x: x.cumsum(-1),
    "logcumsumexp": lambda x: torch.logcumsumexp(x, 1),
    "cummax": lambda x: torch.cummax(x, 1),
    "sort": lambda x: torch.sort(x, stable=True, dim=-1),
    "argmax": lambda x: (x.argmax(-1), x.argmin(0), x.max(1), x.argmax()),
    "any and all": lambda x: ((x > 0).any(1), (x > 0).all(0), (x > 0).sum(1)),
    "gather": lambda x: x.gather(1, WHERE),
    "scatter_add": lambda x: torch.zeros(16, 96).scatter_add(1, WHERE, x),
    "index_put": lambda x: torch.zeros(16, 96).index_put((ROWS,), x[ROWS], accumulate=True),
    "index_put of integers": lambda x: torch.zeros(16, dtype=torch.int64).index_put((ROWS,), ROWS, accumulate=True) + 1,
    "embedding": lambda x: F.embedding(ROWS, x),
    "cat, pad, flip, roll": lambda x: F.pad(torch.cat([x, x.flip(0)], 1).roll(3, 1), (1, 2, 3, 0)),
    "strides": lambda x: (x.t()[::2] + 1).reshape(-1),
    "complex view": lambda x: torch.view_as_complex(x.view(16, 48, 2)).real * 2,
    "integer division": lambda x: (WHERE // 7, WHERE % 5, torch.div(-WHERE, 7, rounding_mode="floor"), x % 0.7),
    "bits": lambda x: (WHERE << 2, WHERE >> 1, ~WHERE, WHERE ^ 3),
    "frexp": torch.frexp,
    "all elements": lambda x: (x.sum(), x.mean(), x.amax()),
}  # fmt: skip


@pytest.mark.parametrize("name", FORWARD)
def test_forward(name, through_triton):
    check(FORWARD[name], X)
    assert through_triton


UNARY = [
    "acos", "asin", "atan", "asinh", "atanh", "sinh", "cosh", "tanh", "tan", "sin", "cos", "exp", "exp2",
    "expm1", "log", "log2", "log10", "log1p", "erf", "erfc", "erfinv", "lgamma", "sigmoid", "sqrt", "rsqrt",
    "ceil", "floor", "round", "trunc", "signbit", "isnan", "isinf", "i0", "reciprocal",
]  # fmt: skip
SPECIAL = [
    "bessel_j0", "bessel_j1", "bessel_y0", "bessel_y1", "modified_bessel_i0", "modified_bessel_i1", "erfcx",
]  # fmt: skip
BINARY = [
    "atan2", "hypot", "nextafter", "pow", "fmod", "remainder", "copysign",
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)], **NAMES)
def test_math(dtype):
    def function(x, y):
        unary = [getattr(torch, name)(x) for name in UNARY] + [getattr(torch.special, name)(x) for name in SPECIAL]
        return unary + [getattr(torch, name)(x, y) for name in BINARY]

    check(function, Y.to(dtype), Y.flip(0).to(dtype) * 2)


@pytest.mark.parametrize(
    "dtype", [pytest.param(t, marks=[] if t == torch.float32 else pytest.mark.slow) for t in FLOATS], **NAMES
)
def test_backward(dtype):
    def function(x):
        x = F.gelu(x) + F.silu(x) * F.relu(x).clamp(max=1.5)
        return torch.softmax(F.layer_norm(x, (96,)), -1).float()

    tolerance = {} if dtype in (torch.float32, torch.float64) else {"rtol": 2e-2, "atol": 2e-2}
    check(function, X.to(dtype), grad=True, **tolerance)


def test_backward_of_indexing():
    check(lambda x: F.embedding(ROWS, x).sin() + x.gather(1, WHERE)[ROWS], X, grad=True)


def test_random_numbers(through_triton):
    def function(x):
        return torch.rand_like(x), F.dropout(x, 0.25), torch.randint(0, 10, (1000,)), torch.bernoulli(Y)

    (uniform, dropped, integers, coins), sources = run_and_get_code(torch.compile(function), torch.ones(64, 128))
    assert "@triton.jit" in "".join(sources) and through_triton
    assert uniform.min() >= 0 and uniform.max() < 1 and abs(uniform.mean() - 0.5) < 0.02
    assert set(dropped.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert abs((dropped == 0).float().mean() - 0.25) < 0.03
    assert set(integers.tolist()) == set(range(10))
    assert set(coins.unique().tolist()) == {0.0, 1.0} and abs(coins.mean() - Y.mean()) < 0.05


def test_dynamic_shapes():
    counter = CompileCounterWithBackend("inductor")
    function = torch.compile(lambda x: torch.softmax(x, -1) + x.cumsum(-1), backend=counter)
    for rows, columns in (16, 96), (3, 200), (7, 33):
        x = torch.randn(rows, columns)
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(x, 1)
        torch.testing.assert_close(function(x), torch.softmax(x, -1) + x.cumsum(-1), rtol=1e-5, atol=1e-5)
    assert counter.frame_count == 1


def training(compiled):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, target = torch.randn(16, 32), torch.randint(0, 4, (16,))

    def loss(x, target):
        return F.cross_entropy(model(x), target)

    loss, step = (torch.compile(loss), torch.compile(optimizer.step)) if compiled else (loss, optimizer.step)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        value = loss(x, target)
        value.backward()
        step()
        losses.append(value.detach())
    return torch.stack(losses)


def test_training(through_triton):
    losses = training(compiled=True)
    assert through_triton
    torch.testing.assert_close(losses, training(compiled=False), rtol=1e-5, atol=1e-5)


def test_transformer_block():
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    check(lambda x: layer(x), torch.randn(2, 8, 32), grad=True, library=True, rtol=1e-4, atol=1e-5)


def test_recurrent_loop():
    cell = torch.nn.Linear(24, 64)

    def function(x):
        h = c = torch.zeros(4, 16)
        for t in range(3):
            i, f, g, o = cell(torch.cat([x[t], h], 1)).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        return h

    check(function, torch.randn(3, 4, 8), grad=True, library=True, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_max_autotune():
    with inductor.patch(max_autotune=True, coordinate_descent_tuning=True):
        check(lambda x: torch.softmax(x, -1) * x.sum(0), torch.randn(64, 512))


@pytest.mark.slow
def test_default_stays_cpp():
    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        pytest.skip("no C++ compiler, which torch.compile's default needs: install g++, or set CXX")
    code = """
import torch, triton_ext
from torch._inductor.utils import run_and_get_code
_, [source] = run_and_get_code(torch.compile(lambda x: x.sin() + 1), torch.ones(64))
assert "cpp_pybinding" in source and "@triton.jit" not in source
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)
