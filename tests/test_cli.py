"""The command, as a user types it."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

import triton_ext.ops
from triton_ext.cli import app

GEMM = f"{Path(triton_ext.ops.__file__).parent}/gemm.py:gemm_all_to_all_kernel"
COPY = f"{Path(__file__).parent}/collectives.py:copy_out"


@pytest.fixture(autouse=True)
def no_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))


def invoke(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_compile_writes_every_stage(tmp_path):
    code, output = invoke("compile", GEMM, "--target", "cuda:90", "--target", "hip:gfx942", "-o", tmp_path / "out")
    assert code == 0, output
    stages = {path.name.split(".", 1)[1] for path in (tmp_path / "out").iterdir()}
    assert {"cuda-90.ttir", "cuda-90.ttgir", "cuda-90.llir", "cuda-90.ptx", "cuda-90.cubin"} <= stages
    assert {"hip-gfx942.ttir", "hip-gfx942.amdgcn", "hip-gfx942.hsaco"} <= stages
    assert output.count("bytes") == len(stages)


def test_compile_takes_types_and_constants(tmp_path):
    sizes = [f"--arg={name}=i32" for name in ("M", "N", "stride")]
    blocks = ["--arg=x=*fp16:16", "--arg=c=all_gather:2:fp16", "--arg=BM=16", "--arg=BN=32"]
    code, output = invoke("compile", COPY, "--target", "cpu", "-o", tmp_path, *sizes, *blocks)
    assert code == 0, output
    assert "tensor<16x32xf16>" in (tmp_path / "copy_out.cpu.ttir").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((COPY, "--target", "cuda:90"), "no type for x, c, M, N, stride, BM, BN"),
        ((COPY + "2", "--target", "cuda:90"), "has no @triton.jit function copy_out2; it has: copy_out"),
        (("nowhere.py:k", "--target", "cuda:90"), "with a Python file that exists"),
        ((GEMM, "--target", "tpu:7"), "target 'tpu:7' is unknown"),
        ((GEMM, "--target", "cpu", "--arg", "Q=1"), "no parameter Q"),
        ((GEMM, "--target", "cpu", "--arg", "Q"), "write it as NAME=VALUE"),
        ((GEMM, "--target", "cpu", "--arg", "c=all_to_all:x"), "write it as collective:dimensions:dtype"),
        ((GEMM, "--target", "cpu", "--arg", "c=all_to_all:3:fp32"), "has 2 sizes, the plan's tensor has 3 dimensions"),
    ],
)
def test_compile_refuses(tmp_path, arguments, message):
    code, output = invoke("compile", *arguments, "-o", tmp_path)
    assert code == 1 and message in output


def test_env_names_the_versions_and_the_device():
    code, output = invoke("env")
    assert code == 0
    assert "triton-ext" in output and "kernels run on" in output
