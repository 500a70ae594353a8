"""triton-ext plan."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from ...errors import PlanningError, TritonExtError

if TYPE_CHECKING:
    from ..cluster import Cluster
    from .plan import ParallelPlan
    from .profiles import Profiles
    from .report import Simulated
    from .result import CostedPlan, SearchResult


class Method(StrEnum):
    ours = "ours"
    metis = "metis"


def plan(
    profiles: Annotated[Path, typer.Argument(help="A folder of profiles in Metis's JSON format.")],
    cluster: Annotated[
        str, typer.Option(help="A cluster file, or published devices and how many: A100-40=8,V100-16=6.")
    ],
    batch: Annotated[int, typer.Option(help="Samples of a training step.", min=1)],
    model: Annotated[str | None, typer.Option(help="Which model, where the folder has several.")] = None,
    algorithm: Annotated[Method, typer.Option(help="Our exact search, or Metis's published one.")] = Method.ours,
    cost: Annotated[Method, typer.Option(help="The cost model that the search minimises.")] = Method.ours,
    time_limit: Annotated[float, typer.Option(help="Seconds, after which the best plan so far is taken.")] = 60.0,
    modelled: Annotated[
        bool, typer.Option(help="Take points that no profile reaches from a roofline; else plans that need them fall.")
    ] = False,
    activation_bytes: Annotated[
        int | None,
        typer.Option(help="What a layer hands to the next for one sample, where profiles do not say.", min=0),
    ] = None,
    top: Annotated[int, typer.Option(help="How many plans to show.", min=1)] = 5,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the best plan as JSON.")] = None,
    png: Annotated[Path | None, typer.Option(help="Draw the best plan's pipeline.")] = None,
) -> None:
    """Find the fastest plan for a training job: pipeline stages, data and tensor parallelism on unequal devices.

    Exits with status 2 if there is no plan.
    """
    from . import plan_file, report
    from .pipeline import simulate

    try:
        found_profiles, notes = _read(profiles, model, activation_bytes)
        found_cluster = _cluster(cluster)
        console = Console(width=max(Console().width, 120))
        console.print(
            f"{found_profiles.model.name}: {found_profiles.model.layers} layers, batch {batch}, on "
            f"{report.cluster_line(found_cluster)}",
            highlight=False,
        )
        evaluate = _evaluate(found_profiles, cost, modelled)
        result = _searching(console, time_limit, _search(
            found_profiles, found_cluster, batch, algorithm, cost, modelled, time_limit, top
        ))  # fmt: skip
        console.print(report.outcome(result), highlight=False)
        simulated = [
            report.Simulated(each, simulate(each.plan, found_cluster, _completed(each, found_profiles, found_cluster)))
            for each in result.plans[:top]
        ]
        _show(console, result, simulated, found_profiles, found_cluster, batch, evaluate)
        for note in (*result.notes, *map(str, notes)):
            console.print(f"note: {note}", highlight=False, style="dim")
        if not simulated:
            raise typer.Exit(2)
        best = simulated[0]
        if output:
            options = {"algorithm": algorithm.value, "cost": cost.value, "modelled": modelled}
            made_from = plan_file.inputs(found_profiles, found_cluster, batch, options)
            file = plan_file.PlanFile(
                best.plan, found_profiles.model.name, made_from, best.costed.cost.total_ms, best.simulated_ms
            )
            try:
                plan_file.dump(file, output)
            except OSError as error:
                raise PlanningError(f"{output}: the plan cannot be written: {error}") from None
            console.print(f"{output}: the best plan", highlight=False, soft_wrap=True)
        if png:
            from . import gantt

            gantt.draw(best.plan, best.step, found_cluster, png)
            console.print(f"{png}: its pipeline", highlight=False, soft_wrap=True)
    except TritonExtError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None


def _read(folder: Path, model: str | None, activation_bytes: int | None) -> tuple[Profiles, tuple[object, ...]]:
    from . import profile_files

    return profile_files.read(folder, model, activation_bytes)


def _cluster(text: str) -> Cluster:
    from .. import cluster_file, presets

    return presets.parse(text) if "=" in text and not Path(text).exists() else cluster_file.load(Path(text))
