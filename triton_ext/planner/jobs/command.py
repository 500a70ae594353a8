"""`triton-ext priorities`: paths, priorities and levels for the jobs of a cluster."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from ... import terminal
from ...errors import TritonExtError

_HEADINGS = ("job", "GPUs", "t (s)", "slowest link", "intensity (Tflop/s)", "k", "priority (Tflop/s)", "level")


def priorities(
    jobs: Annotated[Path, typer.Argument(metavar="JOBS", help="The jobs: a YAML or JSON file.")],
    cluster: Annotated[
        str,
        typer.Option(metavar="C", help="A cluster file, or published devices and how many: A100-40=8,V100-16=6."),
    ],
    levels: Annotated[int, typer.Option(help="Priority levels that the switches have.", min=1, max=64)] = 8,
    simulate: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Also simulate the jobs for so long, with Crux and with other policies."),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write paths, priorities and levels to this file too.")] = None,
) -> None:
    """Paths, priorities and levels of jobs that share a network, after Crux (SIGCOMM 2024)."""
    from .. import cluster_file
    from . import job_file, report

    try:
        read = cluster_file.from_text(cluster)
        plan = report.plan(read, job_file.load(jobs, read), levels)
        compared = report.comparison(plan, levels, simulate) if simulate is not None else []
        if json:
            json.write_text(report.as_json(plan), encoding="utf-8")
    except (TritonExtError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    console = terminal.console(110)
    console.print(_table(_HEADINGS, report.rows(plan)))
    console.print()
    for job in plan.jobs:
        settings = " ".join(f"{name}={value}" for name, value in report.environment(plan, job).items())
        console.print(f"{job.name}: {settings}", highlight=False)
    if compared:
        console.print(f"\nSimulated for {simulate:g} s: computation, share of the GPU time, iterations of each job.")
        console.print(_table(("policy", "Pflop", "computing", *(job.name for job in plan.jobs)), compared))


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=None)
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("job", "slowest link", "policy") else "right")
    for row in rows:
        table.add_row(*row)
    return table
