"""What GPUs get, checked in their assembly: a tile's stores, then a barrier and one system-scope release; no fence."""

import re

import pytest
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from collectives import copy_out
from triton_ext import aot
from triton_ext.ops import embedding, gemm, gemv
from triton_ext.runtime.collectives import signature

CUDA = [GPUTarget("cuda", 90, 32), GPUTarget("cuda", 100, 32)]
HIP = [GPUTarget("hip", "gfx942", 64), GPUTarget("hip", "gfx950", 64)]
COLLECTIVES = ["all_to_all", "all_reduce", "reduce_scatter", "all_gather", "broadcast", "put", "all_reduce_one_shot"]


def name_of(target):
    return f"{target.backend}:{target.arch}"


@pytest.fixture(autouse=True)
def compile_anew(monkeypatch, tmp_path):
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))


def build(collective, target):
    plan, spec = signature(collective, 2)
    kinds = {"x": "*fp32", "c": plan, "M": "i32", "N": "i32", "stride": "i32", "BM": "constexpr", "BN": "constexpr"}
    source = ASTSource(copy_out, kinds, constexprs={(1, 1): spec, (5,): 32, (6,): 64})
    return triton.compile(source, target=target).asm


# The letters of a kernel's memory operations, in the order of the text: S a tile's store (float32), B barrier,
# R release-add at system scope, A acquire at system scope, F a fence of its own.
PTX = {
    "S": r"st\.global\S*\.b32",
    "B": r"bar\.sync",
    "R": r"(?:red|atom)\.global\.sys\.release\.add",
    "A": r"ld\.global\.sys\.acquire",
    "F": r"(?<!wgmma\.)(?:membar|fence)\.(?!proxy)",  # wgmma has fences of its own for shared memory
}
AMDGCN = {
    "S": r"global_store_dwordx?[0-9]* v\[\d+:\d+\], [va]\S+, off",
    "B": r"s_barrier",
    "R": r"buffer_wbl2 sc0 sc1\n(?:(?!.*(?:global_|buffer_|s_barrier)).*\n)*?\s*global_atomic_add_x2 .* sc1",
    "A": r"global_(?:load_dword|atomic_add_)x2 .*sc0 sc1\n(?:(?!.*(?:global_|buffer_)).*\n)*?\s*buffer_inv sc0 sc1",
    "F": r"buffer_wbl2 sc0 sc1",
}


def letters(text, patterns):
    either = "|".join(f"(?P<{letter}>{pattern})" for letter, pattern in patterns.items())
    return "".join(match.lastgroup for match in re.finditer(either, text))


def check(trace, collective):
    """The rules that hold for every target, on the letters of a kernel."""
    assert "F" not in trace, "no fence but those of the releases"
    first, last = trace.index("S"), trace.rindex("S")
    # Only an all_reduce needs no ready-wait: docs/protocol.md says why.
    assert ("A" in trace[:first]) == (collective != "all_reduce"), "the ready-wait comes before the first store"
    assert re.match(r"S+B+R", trace[first:]), "stores, barrier, release"
    assert re.search(r"B+R", trace[last:]) or collective in ("reduce_scatter", "all_reduce_one_shot")
    # Behind the stores of a tile: one release. An all_reduce has three places: partial values, own tiles, shared
    # tiles.
    between = re.sub(r"A|B", "", trace[first : last + 1] + trace[last + 1 :])
    releases = re.findall(r"S+(R*)", between)
    expected = {"all_reduce": [1, 1, 1], "reduce_scatter": [1, 0], "all_reduce_one_shot": [1, 0]}.get(collective, [1])
    assert [min(len(r), 1) for r in releases] == expected


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("target", CUDA, ids=name_of)
def test_ptx(collective, target):
    trace = letters(build(collective, target)["ptx"], PTX)
    check(trace, collective)
    tile = trace[trace.index("S") :]
    assert tile.count("R") == (3 if collective == "all_reduce" else 1), "one release instruction per arrival"


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("target", HIP, ids=name_of)
def test_amdgcn(collective, target):
    check(letters(build(collective, target)["amdgcn"], AMDGCN), collective)


def test_tiles_leave_in_wide_stores():
    """A plan whose rows are aligned compiles to 128-bit stores."""
    assert "st.global.v4.b32" in build("all_to_all", CUDA[0])["ptx"]
    assert "global_store_dwordx4" in build("all_to_all", HIP[0])["amdgcn"]


@pytest.mark.parametrize("target", aot.TARGETS)
@pytest.mark.parametrize("operator", [embedding, gemm, gemv], ids=lambda module: module.__name__.split(".")[-1])
def test_operators(operator, target):
    [(name, arguments)] = operator.SIGNATURES.items()
    stages = aot.compile_for(getattr(operator, name), arguments, target).asm
    patterns = {"cuda": PTX, "hip": AMDGCN}.get(target.split(":")[0])
    if patterns:
        trace = letters(stages["ptx" if patterns is PTX else "amdgcn"], patterns)
        assert re.search("A.*S+B+R", trace), "wait, stores, barrier, release"
        assert "F" not in trace
    else:
        assert len(stages["obj"]) > 1000


@pytest.mark.parametrize("target", CUDA, ids=name_of)
def test_all_threads_leave_a_wait_together(target):
    """Its loop has barriers: whatever decides that it ends, the timeout too, is read by one thread, for all."""
    lines = [line.strip() for line in build("all_reduce", target)["ptx"].splitlines()]
    waits = []
    for begin, line in enumerate(lines):
        if line.startswith("$L__BB") and any("Inner Loop Header" in comment for comment in lines[begin : begin + 4]):
            label = re.escape(line.split(":")[0])
            jump = re.compile(rf"(?:@!?%p\d+ )?bra\S*\s+{label};")
            end = next((n for n in range(begin, len(lines)) if jump.match(lines[n])), begin)
            if any("sys.acquire" in each for each in lines[begin:end]):
                waits.append(lines[begin:end])
    assert len(waits) == 3, "for partial values, of own and of shared tiles, and at the end"
    for loop in waits:
        reads = [line for line in loop if re.search(r"\bld\.(?:volatile\.)?global", line)]
        assert len(reads) == 3, "the counter, the clock and the status"
        assert all(line.startswith("@%p") for line in reads), reads
