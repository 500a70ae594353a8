"""Fused operators between two hosts of one core each, on links of several rates, against what `make bench` compares.

The hosts are network namespaces of this machine (docs/hosts.md): needs root. Prints Markdown tables; writes
results/bench-net.json and a picture for each rate.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

import report
from bench import environment
from triton_ext.emulate import Hosts, measure_link
from triton_ext.errors import HostsError

HERE = Path(__file__).parent
_TIMEOUT_S = 3600
HOSTS = 2

#: At 1 Gbit/s: operator -> what the fused one is compared with, and the most it may take of it.
TARGETS = {
    "gemm_all_to_all": {"limit": 1.15, "unfused_gloo": 0.70, "unfused_mpi": 0.80},
    "embedding_all_to_all": {"unfused_gloo": 0.75},
    "gemv_all_reduce": {"unfused_gloo": 1.0},
}
#: Computation while the proxy ships, of the same in silence: of a GEMM that computes for longer than it communicates.
SLOWED_K, SLOWED = 8192, 1.08


def main(
    rates: Annotated[str, typer.Option(help="Of the links, in Mbit/s, separated by commas.")] = "100,1000,10000",
    short: Annotated[bool, typer.Option(help="One shape for each operator.")] = False,
    runs: Annotated[int, typer.Option(help="Samples of each variant.")] = 15,
    output: Annotated[Path, typer.Option(help="Directory for bench-net.json and the pictures.")] = Path("results"),
) -> None:
    """Measure, and report."""
    output.mkdir(parents=True, exist_ok=True)
    everything: list[dict[str, Any]] = []
    for rate_mbps in (int(rate) for rate in rates.split(",")):
        try:
            records = measure(rate_mbps, short, runs)
        except HostsError as error:
            raise SystemExit(str(error)) from None
        everything += records
        print(f"\n{rate_mbps} Mbit/s\n")
        print(report.markdown(records))
        if rate_mbps == 1000:
            print("\n" + against_targets(records))
        report.plot(records, output / f"bench-net-{rate_mbps}.png", "max(compute only, bytes / rate of the link)")
    (output / "bench-net.json").write_text(json.dumps({"environment": environment(), "records": everything}, indent=1))
    print(f"\nwritten: {output / 'bench-net.json'}, and bench-net-*.png")


def measure(rate_mbps: int, short: bool, runs: int) -> list[dict[str, Any]]:
    """The records at one rate. Raises HostsError where there can be no hosts, typer.Exit if a rank fails."""
    with Hosts(HOSTS, f"{rate_mbps}mbit") as hosts, tempfile.TemporaryDirectory() as scratch:
        speed = measure_link(hosts)
        link = {"hosts": HOSTS, "gbps": rate_mbps / 1000, "bytes_per_s": speed.both_ways_bytes_per_s}
        megabytes = [round(each / 1e6, 1) for each in (speed.one_way_bytes_per_s, speed.both_ways_bytes_per_s)]
        print(
            f"{rate_mbps} Mbit/s: {megabytes[0]} MB/s one way, {megabytes[1]} both ways at once, "
            f"{speed.round_trip_s * 1e6:.0f} us there and back",
            flush=True,
        )
        records = Path(scratch, "records.json")
        settings = {
            "short": short,
            "runs": runs,
            "records": str(records),
            "store": str(Path(scratch, "store")),
            "world": HOSTS,
            "link": link,
            "cores": [host % (os.cpu_count() or 1) for host in range(HOSTS)],
        }
        command, variables = _command(hosts, Path(scratch))
        process = hosts.start(
            0, command, environment=variables | {"OMP_NUM_THREADS": "1", "BENCH": json.dumps(settings)}
        )
        try:
            code = process.wait(_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise HostsError(f"the benchmark had not ended after {_TIMEOUT_S} s") from None
        if code:
            raise typer.Exit(1)
        return json.loads(records.read_text())


def _command(hosts: Hosts, scratch: Path) -> tuple[list[str], dict[str, str]]:
    """What starts a rank on each host, and its environment: mpiexec, which also gives the ranks MPI."""
    mpiexec = shutil.which("mpiexec", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if not importlib.util.find_spec("mpi4py") or not mpiexec:
        raise HostsError("MPI is not installed: pip install 'triton-ext[mpi]'")
    # In place of ssh: it is called with options, an address and a command.
    launcher = scratch / "launch"
    places = "".join(f"{address}) at={hosts.namespace(host)};;\n" for host, address in enumerate(hosts.addresses))
    launcher.write_text(
        '#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do shift; done\n'
        f'case $1 in\n{places}esac\nshift\nexec ip netns exec "$at" sh -c "$*"\n'
    )
    launcher.chmod(0o700)
    options = ["-launcher", "rsh", "-launcher-exec", str(launcher), "-iface", hosts.interface]
    ranks = ["-hosts", ",".join(hosts.addresses), "-n", str(HOSTS), "-ppn", "1"]
    worker = [sys.executable, str(HERE / "bench.py"), "worker"]
    return [mpiexec, *options, *ranks, *worker], {"TRITON_DEFAULT_FP_FUSION": "1"}


def against_targets(records: list[dict[str, Any]]) -> str:
    """What is required at 1 Gbit/s, and what was measured."""
    lines = ["| operator | shape | fused against | at most | measured | |", "|---|---|---|---:|---:|---|"]

    def line(operator: str, shape: str, against: str, most: float, measured: float) -> None:
        verdict = "met" if measured <= most else "not met"
        lines.append(f"| `{operator}` | {shape} | {against} | {most:.2f} | {measured:.2f} | {verdict} |")

    for operator, shape, variants in report.rows(records):
        fused = min(variants[name]["median_ms"] for name in ("fused", "fused_one_shot") if name in variants)
        k = variants["fused"]["shape"].get("K")
        if operator == "gemm_all_to_all" and k == SLOWED_K:
            line(operator, shape, "compute_only", SLOWED, fused / variants["compute_only"]["median_ms"])
            continue
        for against, most in TARGETS[operator].items():
            if against in variants and not (against == "unfused_mpi" and k not in (1024, 2048)):
                line(operator, shape, against, most, fused / variants[against]["median_ms"])
    return "\n".join(lines)


if __name__ == "__main__":
    typer.run(main)
