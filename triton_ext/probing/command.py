"""triton-ext probe."""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .. import terminal
from ..errors import ProbeError, TritonExtError

if TYPE_CHECKING:
    from rich.console import Console

    from ..planner.cluster import Cluster
    from ..planner.measurements import Measurements, Transport

_HOW = """probe measures the ranks of a job: start it with torchrun, as the job will be started, for instance
  torchrun --nproc-per-node 4 -m triton_ext probe -o cluster.yaml
on one host, on each of two hosts (--node-rank 0 and 1)
  torchrun --nnodes 2 --node-rank 0 --master-addr ADDRESS --nproc-per-node 4 -m triton_ext probe -o cluster.yaml
and on two emulated ones (as root)
  triton-ext hosts --hosts 2 -- -m triton_ext probe -o cluster.yaml"""


class Fabric(StrEnum):
    messages = "messages"
    memory = "memory"


def probe(
    output: Annotated[Path, typer.Option("-o", "--output", help="The cluster file: .yaml or .json.")] = Path(
        "cluster.yaml"
    ),
    measurements: Annotated[
        Path | None, typer.Option(help="Where all measured points go; default: beside the cluster file.")
    ] = None,
    fabric: Annotated[
        Fabric,
        typer.Option(
            help="What the cluster file says of ranks on one host: messages, as training jobs send them, or stores to "
            "a peer's memory, as fused kernels do."
        ),
    ] = Fabric.messages,
) -> None:
    """Measure the ranks of a job and the links between them, and write a cluster file. Runs under torchrun."""
    try:
        if "RANK" not in os.environ:
            raise ProbeError(_HOW)
        _probe(output, measurements, fabric)
    except TritonExtError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None


def _probe(output: Path, measurements: Path | None, fabric: Fabric) -> None:
    from datetime import timedelta

    import torch
    import torch.distributed as dist
    from rich.progress import Progress

    from ..planner import cluster_file, measured_cluster
    from ..planner import measurements as measurements_file
    from ..runtime.groups import timeout_s
    from . import report
    from .measure import device_of_rank, measure

    measurements = measurements or measurements_file.path_beside(output)
    timeout = timedelta(seconds=timeout_s())
    device = device_of_rank()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise ProbeError(f"the ranks did not meet within {timeout_s():g} s: {error}") from None
    try:
        control = dist.new_group(backend="gloo", timeout=timeout)
        console = terminal.console(120)
        with Progress(console=console, transient=True, disable=dist.get_rank() != 0) as bar:
            task = bar.add_task("")
            measured = measure(
                device, control, lambda what, done, of: bar.update(task, description=what, completed=done, total=of)
            )
        if dist.get_rank() == 0:
            within: Transport = "memory" if fabric is Fabric.memory and device.type == "cpu" else "messages"
            cluster = measured_cluster.cluster(measured, within)
            try:
                cluster_file.dump(cluster, output)
                measurements_file.dump(measured, measurements)
            except OSError as error:
                raise ProbeError(f"the files cannot be written: {error}") from None
            console.print(report.ranks(measured))
            if len(measured.ranks) > 1:
                console.print(report.transfers(measured), report.collectives(measured))
            _notes(console, measured, cluster, (output, measurements))
    finally:
        dist.destroy_process_group()


def _notes(console: Console, measured: Measurements, cluster: Cluster, files: tuple[Path, Path]) -> None:
    links = "through one switch" if cluster.switches else "with a link of its own for each pair of hosts"
    hosts = f"{len(cluster.nodes)} hosts, {links}" if len(cluster.nodes) > 1 else "1 host"
    console.print(f"{files[0]}: {len(cluster.devices)} devices on {hosts}", highlight=False, soft_wrap=True)
    console.print(f"{files[1]}: all measured points", highlight=False, soft_wrap=True)
    order = [rank for _, ranks in measured.hosts for rank in ranks]
    if order != sorted(order):
        console.print(f"the devices of the cluster, host by host, are the ranks {order}", highlight=False)
