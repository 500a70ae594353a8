"""Fused operators against unfused gloo and MPI, the kernel without its collective, and the limit, on real processes.

Prints a Markdown table; writes results/bench.json and results/bench.png.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

HERE = Path(__file__).parent


def main(
    short: Annotated[bool, typer.Option(help="One shape for each operator.")] = False,
    world: Annotated[int, typer.Option(help="Number of ranks.")] = 2,
    runs: Annotated[int, typer.Option(help="Samples of each variant.")] = 15,
    output: Annotated[Path, typer.Option(help="Directory for bench.json and bench.png.")] = Path("results"),
) -> None:
    """Measure, and report."""
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        records_file = Path(scratch, "records.json")
        settings = {"short": short, "runs": runs, "records": str(records_file), "store": str(Path(scratch, "store"))}
        launch(world, settings)
        records = json.loads(records_file.read_text())
    import report

    print("\n" + report.markdown(records))
    (output / "bench.json").write_text(json.dumps({"environment": environment(), "records": records}, indent=1))
    report.plot(records, output / "bench.png")
    print(f"\nwritten: {output / 'bench.json'}, {output / 'bench.png'}")


def launch(world: int, settings: dict[str, Any]) -> None:
    """Run `worker` on `world` processes, under mpiexec where MPI is installed. Raises typer.Exit if one fails."""
    environ = os.environ | {"OMP_NUM_THREADS": "1", "BENCH": json.dumps(settings | {"world": world})}
    environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    worker = [sys.executable, str(Path(__file__)), "worker"]
    commands: Sequence[tuple[list[str], dict[str, str]]]
    mpiexec = shutil.which("mpiexec", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if importlib.util.find_spec("mpi4py") and mpiexec:
        commands = [([mpiexec, "-n", str(world), *worker], environ)]
    else:
        print("MPI is not installed (pip install 'triton-ext[mpi]'): unfused_mpi is skipped")
        commands = [(worker, environ | {"RANK": str(rank)}) for rank in range(world)]
    processes = [subprocess.Popen(command, env=env) for command, env in commands]
    try:
        codes = [process.wait() for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(codes):
        raise typer.Exit(1)


def worker() -> None:
    """One rank."""
    import torch
    import torch.distributed as dist

    settings = json.loads(os.environ["BENCH"])
    mpi = None
    if "PMI_RANK" in os.environ:
        from mpi import MPI

        mpi = MPI()
    rank = int(os.environ.get("PMI_RANK", os.environ.get("RANK", "0")))
    store = dist.FileStore(settings["store"], settings["world"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=settings["world"])
    import cases
    import triton_ext as tx
    from measure import Link, measure

    if "cores" in settings:
        os.sched_setaffinity(0, {settings["cores"][rank]})
    tx.init()
    torch.manual_seed(rank)
    records: list[dict[str, Any]] = []
    link = Link(**settings["link"]) if "link" in settings else None
    makes = cases.NET if link else cases.SWEEP
    if settings["short"]:
        makes = cases.SHORT
    for number, make in enumerate(makes, 1):
        case = make(mpi)
        found = measure(case, settings["runs"], link)
        case.free()
        records += found
        if rank == 0:
            times = ", ".join(f"{record['variant']} {record['median_ms']:.3g}" for record in found)
            shape = " ".join(f"{name}={size}" for name, size in case.shape.items())
            print(f"{number}/{len(makes)} {case.operator} {shape}: {times} ms", flush=True)
    if rank == 0:
        Path(settings["records"]).write_text(json.dumps(records))
    tx.shutdown()
    dist.barrier()
    dist.destroy_process_group()


def environment() -> dict[str, Any]:
    """What the numbers depend on."""
    from importlib.metadata import version

    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    packages = ("torch", "triton", "llvmlite", "triton-ext")
    return {
        "cpu": names[0].split(":", 1)[1].strip() if names else platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
        "mpi": version("mpich") if importlib.util.find_spec("mpi4py") else None,
    }


if __name__ == "__main__":
    if sys.argv[1:] == ["worker"]:
        worker()
    else:
        typer.run(main)
