"""The reader of Triton IR: what Triton prints is read, what it does not know is named."""

from pathlib import Path

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from triton_ext.errors import CompileError
from triton_ext.ir import read_module, source_line
from triton_ext.ops import embedding, gemm, gemv


@triton.jit
def everything(x, y, n, flag, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    value = tl.load(x + i, mask=i < n, other=float("-inf"))
    total = tl.sum(tl.exp(value), 0)
    if flag > 0:
        total += tl.max(value, 0)
    k = 0
    while k < n:
        total = tl.fma(total, 2.0, 1.0)
        k += 1
    tl.atomic_add(y, total, sem="release", scope="sys")
    tl.device_assert(total > 0, 'text with "quotes"')
    tl.store(y + i, tl.cumsum(value, 0), mask=i < n)


def ttir(kernel, kinds, constants):
    return triton.compile(ASTSource(kernel, kinds, constexprs=constants), target=GPUTarget("cuda", 90, 32)).asm["ttir"]


def test_names_and_locations():
    kinds = {"x": "*fp32", "y": "*fp32", "n": "i32", "flag": "i32", "B": "constexpr"}
    module = read_module(ttir(everything, kinds, {(4,): 64}))
    names = {op.name for op in module.walk()}
    assert {"tt.load", "tt.reduce", "tt.scan", "scf.while", "scf.if", "tt.atomic_rmw", "math.exp"} <= names
    [load] = [op for op in module.walk() if op.name == "tt.load"]
    file, line = source_line(load).rsplit(":", 1)
    assert file.endswith("test_reader.py")
    assert "tl.load" in Path(file).read_text().splitlines()[int(line) - 1]


@triton.jit
def hinted(x, y):
    value = tl.load(x, eviction_policy="evict_first")
    tl.store(y, value, cache_modifier=".cg")


def test_cache_hints():
    module = read_module(ttir(hinted, {"x": "*fp32", "y": "*fp32"}, {}))
    assert [op.name for op in module.walk() if op.name in ("tt.load", "tt.store")] == ["tt.load", "tt.store"]


@pytest.mark.parametrize("operator", [embedding, gemm, gemv], ids=lambda module: module.__name__.split(".")[-1])
def test_the_operators(operator):
    from triton_ext import aot

    [(name, arguments)] = operator.SIGNATURES.items()
    text = aot.compile_for(getattr(operator, name), arguments, "cuda:90").asm["ttir"]
    assert len(list(read_module(text).walk())) > 100


def test_an_unknown_operation_is_named_with_its_line():
    text = """
    module {
      tt.func public @k(%x: !tt.ptr<f32> loc("k.py":1:0)) {
        %0 = tt.unheard_of %x : !tt.ptr<f32> loc(#loc1)
        tt.return loc(#loc1)
      } loc(#loc1)
    } loc(#loc1)
    #loc1 = loc("k.py":7:3)
    """
    with pytest.raises(CompileError, match=r"unheard_of"):
        read_module("\n".join(line[4:] for line in text.splitlines()))


def test_text_that_is_no_ir():
    with pytest.raises(CompileError):
        read_module("module { what is this")
