"""Launching on the CPU: arguments, threads, errors, and what a launch costs."""

import threading
from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl

from triton_ext.backends.cpu import abi, driver, pool
from triton_ext.errors import CompileError, LaunchError


class Pair(NamedTuple):
    x: torch.Tensor
    n: int


@triton.jit
def scalars(out, i, j, f, flag, pair, absent, EXTRA: tl.constexpr):
    tl.store(out, i)
    tl.store(out + 1, j)
    tl.store(out + 2, f)
    tl.store(out + 3, flag)
    tl.store(out + 4, tl.load(pair.x) + pair.n)
    if absent is not None:
        tl.store(out + 5, 1.0)
    tl.store(out + 6, EXTRA)


def test_arguments_of_every_kind():
    out = torch.zeros(7, dtype=torch.float64)
    scalars[(1,)](out, -7, 2**40, 0.25, True, Pair(torch.tensor([3.0]), 4), None, EXTRA=9)
    assert out.tolist() == [-7, 2**40, 0.25, 1, 7, 0, 9]


@pytest.mark.parametrize("value", [1.0, 0.1, -3.3895e38, float("inf"), 1e-40])
def test_half_precision_scalars(value):
    bits = abi._bf16_bits(value)
    assert bits == torch.tensor(value).bfloat16().view(torch.int16).item() & 0xFFFF


def test_a_tensor_that_is_elsewhere():
    out = torch.empty(7, dtype=torch.float64, device="meta")
    with pytest.raises(LaunchError, match=r"out is on meta"):
        scalars[(1,)](out, 1, 2, 0.5, False, Pair(torch.ones(1), 1), None, EXTRA=0)


def test_what_is_not_supported_names_the_operation_and_the_line():
    @triton.jit
    def assembly(x):
        value = tl.inline_asm_elementwise("mov $0, $1;", "=r,r", [tl.load(x)], dtype=tl.int32, is_pure=True, pack=1)
        tl.store(x, value)

    with pytest.raises(CompileError, match=r"test_driver\.py:\d+: .*elementwise_inline_asm"):
        assembly[(1,)](torch.zeros(1, dtype=torch.int32))


def test_device_assert():
    @triton.jit
    def positive(x, n, BLOCK: tl.constexpr):
        i = tl.arange(0, BLOCK)
        tl.device_assert(tl.load(x + i, mask=i < n, other=1) > 0, "not positive")

    positive[(1,)](torch.ones(8), 8, BLOCK=8, debug=True)
    with pytest.raises(LaunchError, match="not positive"):
        positive[(1,)](torch.tensor([1.0, -1.0]), 2, BLOCK=8, debug=True)
    positive[(1,)](torch.ones(8), 8, BLOCK=8, debug=True)


@pytest.mark.parametrize("text", ["0", "-1", "many"])
def test_a_wrong_number_of_threads(text, monkeypatch):
    monkeypatch.setenv("TRITON_EXT_NUM_THREADS", text)
    with pytest.raises(LaunchError, match=f"'{text}' is not a positive number"):
        pool.number_of_threads()


@triton.jit
def fill(out, value, BLOCK: tl.constexpr):
    tl.store(out + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), value)


def test_launches_from_many_threads():
    results = [torch.zeros(64 * 16) for _ in range(8)]

    def launch(value):
        for _ in range(50):
            fill[(64,)](results[value], float(value), BLOCK=16)

    threads = [threading.Thread(target=launch, args=(value,)) for value in range(8)]
    fill[(64,)](results[0], 0.0, BLOCK=16)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all((result == value).all() for value, result in enumerate(results))


def test_an_empty_grid():
    out = torch.zeros(16)
    fill[(0,)](out, 1.0, BLOCK=16)
    assert not out.any()


def test_a_kernel_in_the_cache_is_not_compiled_again(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def build():
        @triton.jit
        def store(out):
            tl.store(out, 5.0)

        out = torch.zeros(1)
        store[(1,)](out)
        return out.item()

    assert build() == 5
    monkeypatch.setattr("triton_ext.backends.cpu.compiler.make_llir", None)
    assert build() == 5


def test_do_bench():
    assert 0 <= driver.do_bench(lambda: None, warmup=1, rep=5, return_mode="median") < 1
    assert len(driver.do_bench(lambda: None, warmup=1, rep=5, quantiles=[0.2, 0.8])) == 2


def test_a_symbol_that_is_missing_is_an_error_and_not_a_jump_to_nowhere():
    from triton_ext.backends.cpu.codegen import native

    source = "declare void @no_such_function()\ndefine void @k() {\n call void @no_such_function()\n ret void\n}"
    binary = native.object_code(native.optimize(source))
    with pytest.raises(LaunchError, match="no_such_function"):
        driver.CPUUtils().load_binary("k", binary, 0, 0)
