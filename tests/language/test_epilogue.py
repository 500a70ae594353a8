"""The language: what an author may type, what is refused in the author's terms, and kernels that do not use it."""

import pytest
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.errors import CompilationError

import triton_ext.language as txl
from triton_ext import passes
from triton_ext.errors import CompileError
from triton_ext.runtime.collectives import signature

CUDA = GPUTarget("cuda", 90, 32)
HIP = GPUTarget("hip", "gfx942", 64)


@pytest.fixture(autouse=True)
def compile_anew(monkeypatch, tmp_path):
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))


def build(kernel, target=CUDA, collective="all_to_all", dtype="fp32", ndim=2, **constants):
    plan, spec = signature(collective, ndim, dtype)
    types = {"x": "*fp32", "c": plan, "n": "i32"}
    names = kernel.arg_names
    kinds = {name: types.get(name, "constexpr") for name in names}
    values = {(names.index("c"), 1): spec} if "c" in names else {}
    values |= {(names.index(name),): value for name, value in constants.items()}
    return triton.compile(ASTSource(kernel, kinds, constexprs=values), target=target)


@triton.jit
def scale(x, c, n, B: tl.constexpr):
    out = txl.epilogue(c, block_shape=[B, B])
    row, column = out.program_tile()
    rows = row * B + tl.arange(0, B)
    columns = column * B + tl.arange(0, B)
    out.store([row * B, column * B], 2 * tl.load(x + rows[:, None] * n + columns[None, :]))


@triton.jit
def by_index(x, c, n, B: tl.constexpr):
    out = txl.epilogue(c, block_shape=[B, B])
    pid = tl.program_id(0)
    rows = tl.load(x + pid * B + tl.arange(0, B)).to(tl.int32)
    out.store([rows, 0], tl.zeros([B, B], tl.float32), mask=(rows != 3)[:, None])


@pytest.mark.parametrize("target", [CUDA, HIP], ids=["cuda", "hip"])
@pytest.mark.parametrize("collective", ["all_to_all", "all_reduce", "reduce_scatter", "all_gather", "broadcast", "put"])
def test_every_collective_lowers_to_standard_operations(collective, target):
    ir = build(scale, target, collective, B=16).asm["ttir"]
    assert "txl." not in ir and "extern_elementwise" not in ir and "inline_asm" not in ir


@pytest.mark.parametrize("collective", ["all_to_all", "all_gather"])
def test_index_tensors_as_coordinates(collective):
    assert "release, sys" in build(by_index, collective=collective, B=16).asm["ttir"]


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp64", "int32", "int8"])
def test_the_value_is_cast_to_the_plans_dtype(dtype):
    build(scale, dtype=dtype, B=16)


@triton.jit
def stores_through_a_helper(x, c, n, B: tl.constexpr):
    out = txl.epilogue(c, block_shape=[B])
    (tile,) = out.program_tile()
    _store(out, tile * B, tl.load(x + tile * B + tl.arange(0, B)))


@triton.jit
def _store(out, start, value):
    out.store([start], value)


def test_an_epilogue_can_be_passed_to_a_helper():
    assert "release, sys" in build(stores_through_a_helper, ndim=1, B=16).asm["ttir"]


@triton.jit
def two_plans(x, c, d, n, B: tl.constexpr):
    first = txl.epilogue(c, block_shape=[B])
    second = txl.epilogue(d, block_shape=[B])
    (tile,) = first.program_tile()
    value = tl.load(x + tile * B + tl.arange(0, B))
    first.store([tile * B], value)
    second.store([tile * B], value)


def test_two_plans_in_one_kernel():
    plan, spec = signature("all_gather", 1)
    kinds = {"x": "*fp32", "c": plan, "d": plan, "n": "i32", "B": "constexpr"}
    source = ASTSource(two_plans, kinds, constexprs={(1, 1): spec, (2, 1): spec, (4,): 16})
    assert triton.compile(source, target=CUDA).asm["ttir"].count("acq_rel, gpu") >= 2


@triton.jit
def too_few_coordinates(x, c, n, B: tl.constexpr):
    out = txl.epilogue(c, block_shape=[B, B])
    row, _ = out.program_tile()
    out.store([row * B], tl.zeros([B, B], tl.float32))


@triton.jit
def wrong_block(x, c, n, B: tl.constexpr):
    out = txl.epilogue(c, block_shape=[B])
    out.store([0], tl.zeros([B], tl.float32))


@triton.jit
def sends_pointers(x, c, n, B: tl.constexpr):
    out = txl.epilogue(c, block_shape=[B, B])
    row, column = out.program_tile()
    out.store([row * B, column * B], x)


@triton.jit
def not_a_plan(x, c, n, B: tl.constexpr):
    txl.epilogue(x, block_shape=[B, B])


@triton.jit
def float_coordinate(x, c, n, B: tl.constexpr):
    out = txl.epilogue(c, block_shape=[B, B])
    row, column = out.program_tile()
    out.store([row * 0.5, column], tl.zeros([B, B], tl.float32))


@triton.jit
def stores_sometimes(x, c, n, B: tl.constexpr):
    out = txl.epilogue(c, block_shape=[B, B])
    row, column = out.program_tile()
    if n > 3:
        out.store([row * B, column * B], tl.zeros([B, B], tl.float32))


@triton.jit
def stores_after_a_return(x, c, n, B: tl.constexpr):
    out = txl.epilogue(c, block_shape=[B, B])
    row, column = out.program_tile()
    if n > 3:
        return
    out.store([row * B, column * B], tl.zeros([B, B], tl.float32))


@triton.jit
def never_stores(x, c, n, B: tl.constexpr):
    out = txl.epilogue(c, block_shape=[B, B])
    row, column = out.program_tile()
    tl.store(x + row, column.to(tl.float32))


@triton.jit
def two_epilogues(x, c, n, B: tl.constexpr):
    out = txl.epilogue(c, block_shape=[B, B])
    again = txl.epilogue(c, block_shape=[B, B])
    row, column = out.program_tile()
    out.store([row * B, column * B], tl.zeros([B, B], tl.float32))
    again.store([row * B, column * B], tl.zeros([B, B], tl.float32))


MISTAKES = [
    (too_few_coordinates, "1 coordinates, the plan's tensor has 2 dimensions"),
    (wrong_block, "block_shape has 1 sizes, the plan's tensor has 2 dimensions"),
    (sends_pointers, "cannot be sent"),
    (not_a_plan, "takes a plan"),
    (float_coordinate, "coordinates are integers"),
    (stores_sometimes, "store inside scf.if"),
    (stores_after_a_return, "early return"),
    (never_stores, "without a store"),
    (two_epilogues, "already has an epilogue"),
]


def chain(error):
    while error:
        yield str(error)
        error = error.__cause__


@pytest.mark.parametrize("kernel, message", MISTAKES, ids=lambda value: getattr(value, "__name__", ""))
def test_mistakes_are_errors_at_the_authors_line(kernel, message):
    with pytest.raises((CompilationError, CompileError)) as error:
        build(kernel, B=16)
    text = "\n".join(chain(error.value))
    assert message in text
    assert kernel.__name__ in text or "test_epilogue.py:" in text


@triton.jit
def plain(x, n, B: tl.constexpr):
    offsets = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(x + offsets, 2 * tl.load(x + offsets, mask=offsets < n), mask=offsets < n)


def test_a_kernel_without_an_epilogue_keeps_its_ir_and_cache_key(monkeypatch):
    with_us = build(plain, B=64)
    monkeypatch.setattr(knobs.runtime, "add_stages_inspection_hook", None)
    without = build(plain, B=64)
    assert with_us.asm["ttir"] == without.asm["ttir"]
    assert with_us.hash == without.hash


def test_the_passes_are_part_of_the_cache_key_of_kernels_that_use_them(monkeypatch):
    before = build(scale, B=16).hash
    monkeypatch.setattr("triton_ext.language.core._PASSES", tl.constexpr("another version"))
    for function in (scale, txl.epilogue):
        function.hash = None
    try:
        assert build(scale, B=16).hash != before
    finally:
        for function in (scale, txl.epilogue):
            function.hash = None


def test_other_stage_hooks_keep_working(monkeypatch):
    seen = []

    def other(backend=None, stages=None, options=None, language=None, capability=None):
        if backend is None:
            return "other", "'other'"
        seen.append(sorted(stages))
        return None

    monkeypatch.setattr(knobs.runtime, "add_stages_inspection_hook", other)
    passes.install()
    assert knobs.runtime.add_stages_inspection_hook() == ("other", "'other'")
    ours = knobs.runtime.add_stages_inspection_hook

    def later(*args):
        seen.append("later")
        return ours(*args)

    monkeypatch.setattr(knobs.runtime, "add_stages_inspection_hook", later)
    passes.install()  # wraps once more; lowering twice changes nothing
    assert "release, sys" in build(scale, B=16).asm["ttir"]
    assert "later" in seen and any("ttir" in stages for stages in seen if stages != "later")
