"""triton-ext plan."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ... import outputs, terminal
from ...errors import PlanningError, TritonExtError

if TYPE_CHECKING:
    from rich.console import Console

    from .planning import Options
    from .search import Progress


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
    cost: Annotated[
        Method | None, typer.Option(help="The cost model that the search minimises; default: the algorithm's own.")
    ] = None,
    schedule: Annotated[str, typer.Option(help="1f1b, gpipe or interleaved.")] = "1f1b",
    allow: Annotated[
        list[str] | None,
        typer.Option(help="recompute, shard-optimizer, shard-parameters or sequence-parallel; may be repeated."),
    ] = None,
    time_limit: Annotated[float, typer.Option(help="Seconds, after which the best plan so far is taken.")] = 60.0,
    modelled: Annotated[
        bool,
        typer.Option(
            "--modelled", help="Points that no profile reaches come from a roofline; else plans fall for them."
        ),
    ] = False,
    activation_bytes: Annotated[
        int | None,
        typer.Option(help="What a layer hands to the next for one sample, where profiles do not say.", min=0),
    ] = None,
    chunks: Annotated[int, typer.Option(help="Of each stage, in an interleaved schedule: 2 or more.", min=1)] = 1,
    allow_unused: Annotated[
        bool, typer.Option("--allow-unused", help="Plans may leave devices out; else they use all.")
    ] = False,
    processes: Annotated[int, typer.Option(help="Processes that search at once.", min=1)] = 1,
    top: Annotated[int, typer.Option(help="How many plans to show.", min=1)] = 5,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the best plan as JSON.")] = None,
    png: Annotated[Path | None, typer.Option(help="Draw the best plan's pipeline.")] = None,
) -> None:
    """Find the fastest plan for a training job: pipeline stages, data and tensor parallelism on unequal devices.

    Exits with status 2 if there is no plan.
    """
    try:
        from .planning import Options

        options = Options(
            algorithm=algorithm.value,
            cost=(cost or algorithm).value,
            schedule=schedule,
            allowed=tuple(allow or ()),
            chunks=chunks,
            allow_unused=allow_unused,
            model_missing=modelled,
            time_limit_s=time_limit,
            keep=top,
            processes=processes,
        )
        _plan(profiles, cluster, batch, model, activation_bytes, options, output, png)
    except TritonExtError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None


def _plan(
    folder: Path,
    cluster_text: str,
    batch: int,
    model: str | None,
    activation_bytes: int | None,
    options: Options,
    output: Path | None,
    png: Path | None,
) -> None:
    from .. import cluster_file
    from . import plan_file, planning, profile_files, report, uniform

    if output:
        outputs.check_file(output, "the plan")
    if png:
        outputs.check_file(png, "the picture")
    profiles, notes = profile_files.read(folder, model, activation_bytes)
    cluster = cluster_file.from_text(cluster_text)
    console = terminal.console(120, highlight=False)
    title = f"{profiles.model.name}: {profiles.model.layers} layers, batch {batch}"
    console.print(f"{title}, on {report.cluster_line(cluster)}")
    with _progress(console, options.time_limit_s) as progress:
        result = planning.search(profiles, cluster, batch, options, progress)
    others = {}
    if result.plans:
        evaluator = planning.evaluator(profiles, options)
        others = {
            "best uniform plan": uniform.best_uniform(profiles, cluster, batch, evaluator),
            "as if all devices were the slowest": uniform.best_as_if_slowest(profiles, cluster, batch, evaluator),
        }
        result = planning.including(result, others.values(), options.keep)
    console.print(report.outcome(result))
    found = [planning.simulated(each, cluster, profiles, options.model_missing) for each in result.plans]
    if found:
        console.print(report.plans(found, cluster), report.stages(found[0], cluster), report.memory(found[0], cluster))
        console.print(report.speed_ups(found[0].costed, others))
        for line in (report.unused(found[0].plan, cluster), *report.unmeasured(found[0].costed)):
            if line:
                console.print(line)
    console.print(report.rejected(result))
    for line in () if found else report.hints(result, options.model_missing, planning.ALLOWED.keys() - options.allowed):
        console.print(line)
    for note in (*result.notes, *notes):
        console.print(f"note: {note}", style="dim")
    if not found:
        raise typer.Exit(2)
    best = found[0]
    if output:
        read_with = {"model": model, "activation_bytes": activation_bytes}
        record = options.record() | {name: value for name, value in read_with.items() if value is not None}
        inputs = plan_file.inputs(profiles, cluster, batch, record)
        file = plan_file.PlanFile(best.plan, profiles.model.name, inputs, best.costed.cost.total_ms, best.simulated_ms)
        try:
            plan_file.dump(file, output)
        except OSError as error:
            raise PlanningError(f"{output}: the plan cannot be written: {error}") from None
        console.print(f"{output}: the best plan", soft_wrap=True)
    if png:
        from . import gantt

        gantt.draw(best.plan, best.step, cluster, png)
        console.print(f"{png}: its pipeline", soft_wrap=True)


@contextmanager
def _progress(console: Console, time_limit_s: float) -> Iterator[Callable[[Progress], None]]:
    """A bar that fills up to the time limit while the search works, with what it tells; gone afterwards."""
    from rich import progress as bars

    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.TextColumn("{task.completed:.0f} s of at most {task.total:g} s"),
    )
    with bars.Progress(*columns, console=console, transient=True) as shown:
        task, done, start = shown.add_task("searching", total=time_limit_s), threading.Event(), time.monotonic()

        def tell(progress: Progress) -> None:
            best = f", best {progress.best_ms:.4g} ms" if math.isfinite(progress.best_ms) else ""
            shown.update(task, description=f"{progress.step}: {progress.done} of {progress.total}{best}")

        def advance() -> None:
            while not done.wait(0.2):
                shown.update(task, completed=time.monotonic() - start)

        thread = threading.Thread(target=advance, daemon=True)
        thread.start()
        try:
            yield tell
        finally:
            done.set()
            thread.join()
