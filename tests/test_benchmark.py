"""The benchmark's report, and (slow) the benchmark itself, with its results checked."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
import report  # noqa: E402


def record(variant, median_ms, operator="gemm_all_to_all"):
    times = {"median_ms": median_ms, "p10_ms": median_ms * 0.9, "p90_ms": median_ms * 1.2}
    return {"operator": operator, "shape": {"M": 4, "K": 2}, "variant": variant, **times}


RECORDS = [record("fused", 11), record("unfused_gloo", 20), record("compute_only", 10), record("limit", 10)]


def test_table():
    head, _, row = report.markdown(RECORDS).splitlines()
    assert "MPI" not in head
    assert row == "| `gemm_all_to_all` | M 4, K 2 | 11 | 20 | 10 | 10 | 1.10 | 0.55 | 0.90 |  |"


def test_the_table_says_where_fused_is_slower():
    records = [*RECORDS, record("unfused_mpi", 10.5)]
    assert (
        report.markdown(records).splitlines()[-1].endswith("| 1.10 | 0.55 | 1.05 | 0.90 | slower than unfused, MPI |")
    )


def test_plot(tmp_path):
    report.plot(RECORDS, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000


@pytest.mark.slow
def test_a_short_run(tmp_path):
    command = [sys.executable, ROOT / "benchmarks/bench.py", "--short", "--runs", "2", "--output", tmp_path]
    run = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads((tmp_path / "bench.json").read_text())
    assert found["environment"]["triton"]
    for each in found["records"]:
        assert each["median_ms"] > 0 and each["world"] == 2 and each["hosts"] == 1
        if each["variant"] in ("fused", "unfused_gloo"):
            assert each["rel_err"] < 1e-5
    assert {each["variant"] for each in found["records"]} >= {"fused", "unfused_gloo", "compute_only", "limit"}
    assert (tmp_path / "bench.png").exists()


@pytest.mark.slow
def test_the_cpu_benchmark(tmp_path):
    command = [sys.executable, ROOT / "benchmarks/cpu.py", "--only", "matmul, 512", "--runs", "3", "--output", tmp_path]
    run = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads((tmp_path / "bench-cpu.json").read_text())
    assert found["environment"]["torch"] and all(rate > 0 for rate in found["limits"].values())
    measured = {(each["dtype"], each["variant"]) for each in found["records"]}
    assert measured == {(d, v) for d in ("float32", "bfloat16") for v in ("triton_ext", "torch", "limit")}
    assert all(each["median_ms"] > 0 for each in found["records"])
    assert (tmp_path / "bench-cpu.png").exists()
