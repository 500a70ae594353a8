"""Kernels of plans with peers behind NVSHMEM: what is called, where, and under which condition; and no other kernel."""

import re

import pytest
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from collectives import copy_out
from triton_ext import aot
from triton_ext.errors import CompileError
from triton_ext.ops import embedding, gemm, gemv
from triton_ext.passes import nvshmem
from triton_ext.runtime.collectives import signature

CAPABILITIES = [90, 100]
COLLECTIVES = ["all_to_all", "all_reduce", "all_reduce_one_shot", "reduce_scatter", "all_gather", "broadcast", "put"]
PUT, ADD, WAIT = "nvshmem_putmem_signal_nbi", "nvshmemx_signal_op", "nvshmem_signal_wait_until"

needs_library = pytest.mark.skipif(nvshmem.library(90) is None, reason="nvidia-nvshmem-cu12 is not installed")


@pytest.fixture(autouse=True)
def compile_anew(monkeypatch, tmp_path):
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))


@pytest.fixture
def unlinked(monkeypatch):
    """Compile as far as PTX, with NVSHMEM's functions as declarations."""
    before = knobs.runtime.add_stages_inspection_hook

    def hook(*args):
        found = before(*args)
        if args:
            args[1]["cubin"] = lambda ptx, metadata: b""
        return found

    hook.lowers_epilogues = True
    monkeypatch.setattr(knobs.runtime, "add_stages_inspection_hook", hook)
    monkeypatch.setattr(nvshmem, "link", lambda options, metadata, capability: None)


def build(collective, capability, transport="nvshmem-test"):
    plan, spec = signature(collective, 2, transport=transport)
    kinds = {"x": "*fp32", "c": plan, "M": "i32", "N": "i32", "stride": "i32", "BM": "constexpr", "BN": "constexpr"}
    source = ASTSource(copy_out, kinds, constexprs={(1, 1): spec, (5,): 32, (6,): 64})
    return triton.compile(source, target=GPUTarget("cuda", capability, 32))


# The letters of a kernel's memory operations: as in test_targets.py, and C a slice's counter, P a put with its signal,
# A an addition to a signal of a peer, W NVSHMEM's wait, a acquire.
LETTERS = {
    "S": r"st\.global\S*\.b32",
    "B": r"bar\.sync",
    "R": r"(?:red|atom)\.global\.sys\.release\.add",
    "C": r"atom\.global\.sys\.acq_rel\.add",
    "a": r"ld\.global\.sys\.acquire",
    "P": rf"call\.uni.*{PUT},",
    "A": rf"call\.uni.*{ADD},",
    "W": rf"call\.uni.*{WAIT},",
}


def letters(ptx):
    either = "|".join(f"(?P<{letter}>{pattern})" for letter, pattern in LETTERS.items())
    return "".join(match.lastgroup for match in re.finditer(either, ptx))


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_a_slice_is_sent_once_behind_its_barrier_and_its_counter(unlinked, collective, capability):
    trace = letters(build(collective, capability).asm["ptx"])
    # The places where tiles leave: partial values, and in an all_reduce own tiles and shared tiles when reduced.
    places = 3 if collective == "all_reduce" else 1
    assert trace.count("C") == trace.count("P") == places
    assert trace.count("A") == (0 if collective == "all_reduce" else 1), "READY of a peer"
    sent = re.sub("[aWA]", "", trace[trace.index("S") :])
    assert len(re.findall(r"S+B+(?:R|C|P|B)*", sent)) >= places
    for match in re.finditer("P", trace):
        before = trace[: match.start()]
        assert "C" in before, "a counter says that the slice is complete"
        assert re.search(r"B[^S]*$", before), "a barrier lies between the tile's stores and the put"
    assert "R" in trace, "peers that stores reach are told as always"
    # Behind each wait for values, NVSHMEM makes sure of them.
    waits = {"all_reduce": 3, "reduce_scatter": 2}.get(collective, 1)
    assert trace.count("W") == waits
    assert collective in ("reduce_scatter", "all_reduce_one_shot") or re.search("a+[^S]*W[^S]*$", trace), "the tail"


TTIR_GUARDS = re.compile(
    r"%(?P<stored>\w+) = tt\.atomic_rmw add, acq_rel, sys.*?"
    r"%(?P<sum>\w+) = arith\.addi %(?P=stored), .*?"
    r"%(?P<whole>\w+) = arith\.cmpi eq, %(?P=sum), .*?"
    r"%(?P<guard>\w+) = arith\.andi %\w+, %(?P=whole) .*?"
    r"scf\.if %(?P=guard) \{.*?"
    r"scf\.while.*?"
    r"tt\.elementwise_inline_asm \"mov\.u32 \$0, %tid\.x;\".*?"
    r"scf\.if %\w+ \{\s*%\w+ = tt\.extern_elementwise .*?pure = false, symbol = \"" + PUT,
    re.DOTALL,
)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_the_put_is_that_of_one_thread_of_the_program_that_completes_the_slice(unlinked, collective):
    ttir = re.sub(r" loc\(.*?\)$", "", build(collective, 90).asm["ttir"], flags=re.MULTILINE)
    places = 3 if collective == "all_reduce" else 1
    assert len(TTIR_GUARDS.findall(ttir)) == places
    assert ttir.count(f'symbol = "{PUT}"') == places
    for line in ttir.splitlines():
        if "symbol" in line:
            assert "pure = false" in line and 'libname = ""' in line


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_other_plans_have_nothing_of_it(collective):
    kernel = build(collective, 90, transport="")
    for stage in ("ttir", "llir", "ptx"):
        assert "nvshmem" not in kernel.asm[stage].replace("passes/nvshmem.py", "")
    assert [name for name, _ in kernel.metadata.extern_libs] == ["libdevice"]


@pytest.mark.parametrize("operator", [embedding, gemm, gemv], ids=lambda module: module.__name__.split(".")[-1])
def test_operators(unlinked, operator):
    [(name, arguments)] = operator.SIGNATURES.items()
    arguments = {
        key: f"{value}:nvshmem" if str(value).split(":")[0] in COLLECTIVES else value
        for key, value in arguments.items()
    }
    trace = letters(aot.compile_for(getattr(operator, name), arguments, "cuda:90").asm["ptx"])
    assert re.search("S+B+.*C.*P", trace)


def test_without_the_library_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(nvshmem, "library", lambda capability: None)
    with pytest.raises(CompileError, match="pip install nvidia-nvshmem-cu12"):
        build("all_to_all", 90)


@pytest.mark.parametrize("target", ["hip:gfx942", "cpu"])
def test_for_another_target_it_is_refused(target):
    [(name, arguments)] = gemm.SIGNATURES.items()
    arguments = arguments | {
        key: "all_to_all:2:fp32:nvshmem" for key, value in arguments.items() if "all_to_all" in str(value)
    }
    with pytest.raises(CompileError, match="is for CUDA"):
        aot.compile_for(getattr(gemm, name), arguments, target)


@pytest.mark.slow
@needs_library
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_linked_with_the_device_library(capability):
    kernel = build("all_reduce", capability, nvshmem.transport())
    ptx = kernel.asm["ptx"]
    for symbol in (PUT, ADD, WAIT):
        assert f".extern .func  (.param .b32 func_retval0) {symbol}" not in ptx, "it has a body"
    assert "nvshmemi_device_state_d" in ptx, "which cumodule_init fills"
    assert len(kernel.asm["cubin"]) > 10_000
    assert nvshmem.LIBRARY in dict(kernel.metadata.extern_libs), "which the hook behind its loading looks for"
