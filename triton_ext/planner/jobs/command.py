"""`triton-ext priorities`: paths, priorities and levels for the jobs of a cluster."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ...errors import TritonExtError


def priorities(
    jobs: Annotated[Path, typer.Argument(metavar="JOBS", help="The jobs: a YAML or JSON file.")],
    cluster: Annotated[Path, typer.Option("--cluster", metavar="C", help="The network: a YAML or JSON file.")],
    json: Annotated[Path | None, typer.Option(help="Write paths, priorities and levels to this file too.")] = None,
) -> None:
    """Paths, priorities and levels of jobs that share a network, after Crux (SIGCOMM 2024)."""
    from .report import as_json, plan, rows

    try:
        planned = plan(jobs, cluster)
        if json:
            json.write_text(as_json(planned), encoding="utf-8")
    except (TritonExtError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    table = Table(box=None)
    headings = ("job", "GPUs", "t (s)", "slowest link", "intensity (Tflop/s)", "k", "priority (Tflop/s)", "level")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("job", "slowest link") else "right")
    for row in rows(planned):
        table.add_row(*row)
    Console(width=max(Console().width, 110)).print(table)  # narrower, numbers would be cut off
