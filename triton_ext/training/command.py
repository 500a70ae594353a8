"""`triton-ext profile`, `run` and `export`: what they do and print."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn
from rich.table import Table

from .. import outputs
from ..errors import PlanningError
from ..planner import cluster_file
from ..planner.parallel import plan_file, planning, profile_files
from ..planner.parallel.cost import estimate
from ..planner.parallel.pipeline import simulate
from . import profile_reports

if TYPE_CHECKING:
    from ..planner.cluster import Cluster

TRANSFORMER = "triton_ext.training.transformer:transformer"


def numbers(text: str, option: str, kind: type[int] | type[float]) -> tuple[Any, ...]:
    """Numbers with commas between them."""
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise PlanningError(f"{option} {text}: write it as numbers with commas, for instance 1,2") from None


def profile(
    model: str,
    arguments: Sequence[str],
    output: Path,
    *,
    degrees: str,
    samples: str,
    repeats: int,
    threads: int,
    cpu_quota: float,
    together: bool,
    device: str | None,
    device_type: str | None,
    timeout_s: float,
    console: Console,
) -> None:
    import torch

    from ..user_code import name_values
    from . import profile as profiling

    task = profiling.Task(
        model,
        name_values(arguments),
        numbers(degrees, "--tp", int),
        numbers(samples, "--samples", int),
        repeats,
        threads,
        cpu_quota,
        together,
        device or ("cuda" if torch.cuda.is_available() else "cpu"),
    )
    name = device_type or profiling.default_device_type(task)
    profiling.check_output(output, name)
    with Progress(SpinnerColumn(), TextColumn("{task.description}"), console=console, transient=True) as progress:
        bar = progress.add_task("starting")
        profiles, report = profiling.profile(
            task, name, timeout_s, lambda line: progress.update(bar, description=line), output
        )
    paths = profiling.write(profiles, report, output)
    table = Table(title=f"{profiles.model.name} on {name}", title_justify="left")
    for heading in (
        "tp",
        "samples",
        "forward (ms)",
        "backward (ms)",
        "p10 to p90 (ms)",
        "optimizer (ms)",
        "memory (MiB)",
    ):
        table.add_column(heading, justify="right")
    for entry in report["points"]:
        point = profiles.points[name, entry["tp"], entry["samples"]]
        table.add_row(
            str(entry["tp"]),
            str(entry["samples"]),
            f"{sum(entry['forward_ms']):.2f}",
            f"{sum(entry['backward_ms']):.2f}",
            f"{entry['p10_ms']:.2f} to {entry['p90_ms']:.2f}",
            f"{point.optimizer_ms:.2f}",
            f"{sum(point.memory_bytes) / 2**20:.1f}",
        )
    console.print(table)
    for entry in report["infeasible"]:
        console.print(f"infeasible: tp {entry['tp']}, {entry['samples']} samples: {entry['reason']}", highlight=False)
    if max(task.degrees) > 1:
        console.print(f"Degrees above 1: {report['tensor_parallel']}.", highlight=False)
    console.print(f"{len(paths)} files in {output}; fingerprint {report['sha256'][:12]}", highlight=False)


def run(
    plan: Path,
    arguments: Sequence[str],
    *,
    model: str | None,
    profiles: Path | None,
    cluster: Path | None,
    cpu_quota: str | None,
    steps: int,
    warmup: int,
    learning_rate: float,
    threads: int,
    check: bool,
    timeout_s: float,
    console: Console,
) -> None:
    from ..user_code import name_values
    from . import launch, quota

    file = plan_file.load(plan)
    location, recorded = _recorded_model(profiles, file.inputs.options.get("model"))
    given = name_values(arguments)
    if recorded is not None and given and given != recorded:
        raise PlanningError(f"the profiles are of {location} with {recorded}, not with {given}")
    if model and recorded is not None and model != location:
        raise PlanningError(f"the profiles are of {location}, not of {model}")
    where = cluster_file.load(cluster) if cluster else None
    quotas = numbers(cpu_quota, "--cpu-quota", float) if cpu_quota else where and quota.of_devices(where)
    job = launch.Job(
        (file.plan,),
        model or location or TRANSFORMER,
        given or recorded or {},
        steps=steps,
        warmup=warmup,
        learning_rate=learning_rate,
        threads=threads,
        cpu_quotas=quotas or (),
        check=check,
    )
    predictions = _predicted(file, profiles, where, console)
    (measured,) = launch.run(job, timeout_s, lambda line: console.print(line, highlight=False))
    ordered = sorted(measured.steps_s)
    console.print(
        f"median step {measured.median_s * 1e3:.1f} ms ({ordered[0] * 1e3:.1f} to {ordered[-1] * 1e3:.1f}), "
        f"loss {measured.losses[0]:.4f} to {measured.losses[-1]:.4f}",
        highlight=False,
    )
    for name, predicted_ms in predictions.items():
        if predicted_ms is not None:
            error = predicted_ms / measured.median_s / 10 - 100
            console.print(f"predicted by {name}: {predicted_ms:.1f} ms, {error:+.1f} %", highlight=False)
    if measured.loss_difference is not None:
        console.print(
            f"against a single process: loss differs by {measured.loss_difference:.1e}, gradients by "
            f"{measured.gradient_difference:.1e} of their layer's largest",
            highlight=False,
        )


def cpu_cluster(cpu_quotas: str, output: Path, timeout_s: float, console: Console) -> None:
    from . import links

    outputs.check_file(output, "the cluster")
    cluster = links.measure(numbers(cpu_quotas, "the quotas", float), timeout_s)
    cluster_file.dump(cluster, output)
    table = Table(title=f"{len(cluster.nodes)} devices on this machine", title_justify="left")
    for heading in ("type", "float32 (Gflop/s)", "memory (GB/s)"):
        table.add_column(heading, justify="right")
    for kind in cluster.device_types:
        bandwidth = kind.memory_bandwidth_bytes_per_s
        table.add_row(kind.name, f"{kind.peak_flop_per_s / 1e9:.1f}", f"{bandwidth / 1e9:.1f}")
    console.print(table)
    speeds = sorted(link.bandwidth_bytes_per_s for link in cluster.links)
    if speeds:
        console.print(f"links of {speeds[0] / 1e9:.2f} to {speeds[-1] / 1e9:.2f} GB/s", highlight=False)
    console.print(f"written to {output}", highlight=False)


def export(plan: Path, to: str, output: Path | None, console: Console) -> None:
    from .export import export as convert

    text = convert(plan_file.load(plan).plan, to)
    if output is None:
        console.print(text, end="", markup=False, highlight=False, soft_wrap=True)
    else:
        outputs.write(output, text, "the plan")
        console.print(f"{output}: {len(text.splitlines())} lines", highlight=False)


def _predicted(
    file: plan_file.PlanFile, profiles: Path | None, cluster: Cluster | None, console: Console
) -> dict[str, float | None]:
    """Milliseconds that a step takes by simulation and by the cost model; without profiles and a cluster, by the plan
    file."""
    simulator, model = "simulation", "the cost model"
    if profiles is None or cluster is None:
        return {simulator: file.simulated_ms, model: file.cost_ms}
    options = file.inputs.options
    name, size = options.get("model"), options.get("activation_bytes")
    points, _ = profile_files.read(
        profiles, name if isinstance(name, str) else None, size if isinstance(size, int) else None
    )
    now = plan_file.inputs(points, cluster, file.plan.global_batch, options)
    for change in file.inputs.changes(now):
        console.print(f"the plan was made from other inputs: {change}", highlight=False)
    points = planning.completed(file.plan, points, cluster, bool(options.get("model_missing")))
    return {
        simulator: simulate(file.plan, cluster, points).step_time_s * 1e3,
        model: estimate(file.plan, cluster, points).step_time_s * 1e3,
    }


def _recorded_model(profiles: Path | None, name: object) -> tuple[str | None, dict[str, Any] | None]:
    """The model that profiles were measured with, and its arguments, where they say. name: of the model's own folder
    among several."""
    if profiles is None:
        return None, None
    folder = profiles / name if isinstance(name, str) and (profiles / name).is_dir() else profiles
    for report in profile_reports.load(folder).values():
        return report["model"], report["arguments"]
    return None, None
