"""Predicted against measured step times of parallelism plans, on CPU processes of different speed.

Measures the profiles of a small transformer and the links with the same CPU quotas that the ranks get, predicts every
plan's step from them (simulator and cost model), then executes all plans in turn, and compares: rank correlation, and
the place of the best predicted plan among the measured ones. Writes results/training_plans.json and .png.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import statistics
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from scipy.stats import spearmanr

from triton_ext.planner.parallel.cost import estimate
from triton_ext.planner.parallel.pipeline import simulate
from triton_ext.planner.parallel.plan import ParallelPlan, Replica, Settings, Stage
from triton_ext.planner.parallel.profiles import Profiles
from triton_ext.training import launch, links, profile

QUOTAS = (0.4, 0.4, 0.2, 0.2)  # cores of devices 0 to 3: 1.2 together, of the machine's 2
MODEL = {"width": 192, "blocks": 6, "heads": 4, "sequence": 64, "vocabulary": 512}
BATCH = 32
PROFILES = 3


def plan(
    *stages: tuple[int, list[tuple[list[int], int]]], microbatches: int, schedule: str = "1f1b", chunks: int = 1
) -> ParallelPlan:
    """Stages as (layers, [(devices, samples of a micro-batch), …])."""
    begin, made = 0, []
    for layers, replicas in stages:
        made.append(Stage(begin, begin + layers, tuple(Replica(tuple(d), samples) for d, samples in replicas)))
        begin += layers
    return ParallelPlan(tuple(made), microbatches, BATCH, schedule, Settings(chunks_per_stage=chunks))


PLANS = {
    "one fast device": plan((8, [([0], 8)]), microbatches=4),
    "dp 2, fast": plan((8, [([0], 4), ([1], 4)]), microbatches=4),
    "dp 4, even": plan((8, [([0], 2), ([1], 2), ([2], 2), ([3], 2)]), microbatches=4),
    "dp 4, by speed": plan((8, [([0], 3), ([1], 3), ([2], 1), ([3], 1)]), microbatches=4),
    "tp 2, fast": plan((8, [([0, 1], 8)]), microbatches=4),
    "pp 2, fast": plan((4, [([0], 4)]), (4, [([1], 4)]), microbatches=8),
    "pp 2, fast, gpipe, 4": plan((4, [([0], 8)]), (4, [([1], 8)]), microbatches=4, schedule="gpipe"),
    "pp 2, fast, interleaved": plan((4, [([0], 4)]), (4, [([1], 4)]), microbatches=8, schedule="interleaved", chunks=2),
    "pp 4, even": plan((2, [([0], 4)]), (2, [([1], 4)]), (2, [([2], 4)]), (2, [([3], 4)]), microbatches=8),
    "pp 4, by speed": plan((3, [([0], 4)]), (2, [([1], 4)]), (1, [([2], 4)]), (2, [([3], 4)]), microbatches=8),
    "pp 2, dp 2 fast then slow": plan((5, [([0], 2), ([1], 2)]), (3, [([2], 2), ([3], 2)]), microbatches=8),
    "pp 2, dp 2 mixed, by speed": plan((4, [([0], 3), ([2], 1)]), (4, [([1], 3), ([3], 1)]), microbatches=8),
    "pp 3, slow dp 2 last": plan((3, [([0], 4)]), (3, [([1], 4)]), (2, [([2], 2), ([3], 2)]), microbatches=8),
    "pp 2, tp 2 fast then dp 2 slow": plan((6, [([0, 1], 4)]), (2, [([2], 2), ([3], 2)]), microbatches=8),
}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rounds", type=int, default=7, help="times that all plans take turns")
    arguments.add_argument("--steps", type=int, default=1, help="steps of a plan in a round")
    arguments.add_argument("--results", type=Path, default=Path("results"))
    chosen = arguments.parse_args()
    console = Console(width=120)
    began = time.monotonic()
    cluster = links.measure(QUOTAS)
    profiles = measured_profiles(console)
    predicted = {
        name: (simulate(p, cluster, profiles).step_time_s, estimate(p, cluster, profiles).step_time_s)
        for name, p in PLANS.items()
    }
    job = launch.Job(
        tuple(PLANS.values()), arguments=MODEL, rounds=chosen.rounds, steps=chosen.steps, warmup=2, cpu_quotas=QUOTAS
    )
    measured = dict(zip(PLANS, launch.run(job, timeout_s=900), strict=True))
    records = [
        {
            "plan": name,
            "description": describe(PLANS[name]),
            "simulated_ms": predicted[name][0] * 1e3,
            "cost_model_ms": predicted[name][1] * 1e3,
            "median_ms": found.median_s * 1e3,
            "p10_ms": quantile(found.steps_s, 0.1) * 1e3,
            "p90_ms": quantile(found.steps_s, 0.9) * 1e3,
            "runs": len(found.steps_s),
            "first_loss": found.losses[0],
            "last_loss": found.losses[-1],
        }
        for name, found in measured.items()
    ]
    records.sort(key=lambda record: record["median_ms"])
    summary = summarize(records)
    console.print(table(records))
    console.print(
        f"Spearman's rank correlation: simulator {summary['spearman_simulated']:.3f}, cost model "
        f"{summary['spearman_cost_model']:.3f}; the best predicted plan is number {summary['best_predicted_place']} of "
        f"those measured; median error of the simulator {summary['median_error']:.1%}.",
        highlight=False,
    )
    document = {
        "environment": {
            "cpu_quotas": QUOTAS,
            "model": MODEL,
            "global_batch": BATCH,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
            "elapsed_s": time.monotonic() - began,
        },
        "summary": summary,
        "records": records,
        "cluster": dataclasses.asdict(cluster),
        "profiles": [{"key": key, **dataclasses.asdict(point)} for key, point in sorted(profiles.points.items())],
    }
    chosen.results.mkdir(exist_ok=True)
    (chosen.results / "training_plans.json").write_text(json.dumps(document, indent=2) + "\n")
    draw(records, chosen.results / "training_plans.png")
    sys.exit(0 if summary["spearman_simulated"] >= 0.8 and summary["best_predicted_place"] <= 2 else 1)


def measured_profiles(console: Console) -> Profiles:
    """Of both kinds of devices, with the samples and degrees that the plans use: the medians of measurements in turn,
    so that what else the machine does at a time changes no device's share alone."""
    turns = []
    for turn in range(PROFILES):
        console.print(f"profiling, {turn + 1} of {PROFILES}")
        turns.append(one_profile())
    points = {
        key: dataclasses.replace(
            point,
            layer_ms=medians([turn.points[key].layer_ms for turn in turns]),
            forward_backward_ms=sum(medians([turn.points[key].layer_ms for turn in turns])),
            optimizer_ms=statistics.median(turn.points[key].optimizer_ms for turn in turns),
            forward_share=statistics.median(turn.points[key].forward_share for turn in turns),
        )
        for key, point in turns[0].points.items()
    }
    return dataclasses.replace(turns[0], points=points)


def medians(rows: list[tuple[float, ...]]) -> tuple[float, ...]:
    return tuple(statistics.median(column) for column in zip(*rows, strict=True))


def one_profile() -> Profiles:
    found: Profiles | None = None
    for quota in sorted(set(QUOTAS)):
        used = {
            (replica.tp, replica.samples)
            for p in PLANS.values()
            for stage in p.stages
            for replica in stage.replicas
            if any(QUOTAS[device] == quota for device in replica.devices)
        }
        for degree in sorted({tp for tp, _ in used}):
            samples = tuple(sorted(size for tp, size in used if tp == degree))
            task = profile.Task(
                launch.Job.model, MODEL, (degree,), samples, repeats=3, cpu_quota=quota, together=degree > 1
            )
            name = profile.default_device_type(task)
            profiles, report = profile.profile(task, name)
            if report["infeasible"]:
                sys.exit(f"infeasible: {report['infeasible']}")
            points = profiles.points if found is None else {**found.points, **profiles.points}
            found = dataclasses.replace(profiles, points=points)
    assert found is not None
    return found


def summarize(records: list[dict]) -> dict[str, float]:
    medians = [record["median_ms"] for record in records]
    best = min(range(len(records)), key=lambda index: records[index]["simulated_ms"])
    errors = sorted(abs(record["simulated_ms"] / record["median_ms"] - 1) for record in records)
    return {
        "plans": len(records),
        "spearman_simulated": float(spearmanr(medians, [r["simulated_ms"] for r in records]).statistic),
        "spearman_cost_model": float(spearmanr(medians, [r["cost_model_ms"] for r in records]).statistic),
        "best_predicted_place": best + 1,  # records are sorted by measured time
        "median_error": errors[len(errors) // 2],
    }


def describe(p: ParallelPlan) -> str:
    """Stages as layers:replicas, a replica as its devices times its samples."""
    stages = [
        f"{stage.end - stage.begin}:" + "|".join(f"{'+'.join(map(str, r.devices))}x{r.samples}" for r in stage.replicas)
        for stage in p.stages
    ]
    return f"{' '.join(stages)}, {p.microbatches} micro-batches, {p.schedule}"


def table(records: list[dict]) -> Table:
    made = Table(title="A training step, in ms, fastest first", title_justify="left")
    for heading in ("plan", "measured", "p10 to p90", "simulated", "error", "cost model"):
        made.add_column(heading, justify="left" if heading == "plan" else "right")
    for record in records:
        made.add_row(
            record["plan"],
            f"{record['median_ms']:.0f}",
            f"{record['p10_ms']:.0f} to {record['p90_ms']:.0f}",
            f"{record['simulated_ms']:.0f}",
            f"{record['simulated_ms'] / record['median_ms'] - 1:+.0%}",
            f"{record['cost_model_ms']:.0f}",
        )
    return made


def draw(records: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FixedLocator, NullLocator

    figure, axes = plt.subplots(figsize=(8.4, 5.2), layout="constrained")
    x, y = [r["simulated_ms"] for r in records], [r["median_ms"] for r in records]
    low, high = min(x + y) * 0.9, max(x + y) * 1.1
    axes.plot([low, high], [low, high], color="grey", linewidth=0.8, label="simulated = measured")
    for number, record in enumerate(records, 1):
        at = record["simulated_ms"], record["median_ms"]
        spread = [[at[1] - record["p10_ms"]], [record["p90_ms"] - at[1]]]
        axes.errorbar(
            *at, spread, fmt="o", markersize=4, capsize=2, color="tab:blue", label=f"{number}: {record['plan']}"
        )
        axes.annotate(str(number), at, (5, -9), fontsize=8, textcoords="offset points")
    axes.set(xscale="log", yscale="log", xlabel="simulated step (ms)", ylabel="measured step (ms), p10 to p90")
    ticks = [t for t in (200, 300, 400, 500, 600, 800, 1000, 1500, 2000, 3000, 4000) if low <= t <= high]
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(FixedLocator(ticks))
        axis.set_major_formatter("{x:.0f}")
        axis.set_minor_locator(NullLocator())
    axes.set_title(f"{len(records)} plans on CPU quotas {', '.join(map(str, QUOTAS))}")
    figure.legend(loc="outside right center", fontsize=8, markerscale=0, handlelength=0.5)
    figure.savefig(path, dpi=130)


def quantile(values: tuple[float, ...], part: float) -> float:
    return sorted(values)[round(part * (len(values) - 1))]


if __name__ == "__main__":
    main()
