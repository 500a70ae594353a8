"""Simulated gains of Crux over the baselines on generated jobs: python benchmarks/priorities.py SPECIFICATION.csv

Nothing here is measured on a cluster. Writes a JSON of all runs, and the picture in docs/priorities.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from triton_ext.planner.jobs import baselines
from triton_ext.planner.jobs.policy import Decision, Policy, Snapshot, crux
from triton_ext.planner.jobs.simulator import simulate
from triton_ext.planner.jobs.trace import Specification, generate, read_specification

LEVELS = 8


def crux_paths(snapshot: Snapshot) -> Decision:
    """Crux without priorities: what its paths alone bring."""
    decision = crux(snapshot)
    return Decision(decision.routes, dict.fromkeys(decision.levels, 0))


POLICIES: dict[str, Policy] = {
    "crux": crux,
    "its paths": crux_paths,
    "ECMP": baselines.ecmp,
    "SJF": baselines.shortest_first,
    "Sincronia": baselines.sincronia,
    "time shift": baselines.time_shift,
    "TACCL*": baselines.farthest_first,
}


def measure(specification: Specification, aggregations: int, uplink: float, span_s: float, seeds: int) -> list[dict]:
    network = specification.network(aggregations, 100e9, uplink)
    runs = []
    for seed in range(seeds):
        submissions = generate(specification.hosts(), specification.gpus_per_host, span_s, seed)
        for name, policy in POLICIES.items():
            began_s = time.perf_counter()
            outcome = simulate(network, submissions, policy, LEVELS, span_s, seed)
            wall_s = time.perf_counter() - began_s
            run = {
                "seed": seed,
                "policy": name,
                "jobs": len(submissions),
                "computed_flop": outcome.computed_flop,
                "utilisation": outcome.utilisation,
                "flow_events": outcome.flow_events,
                "flow_events_per_s": outcome.flow_events / wall_s,
                "decisions": outcome.decisions,
                "largest_gap_share": outcome.largest_gap_share,
            }
            print(json.dumps(run), flush=True)
            runs.append(run)
    return runs


def gains(runs: list[dict]) -> dict[str, list[float]]:
    """How much more is computed with Crux, in percent, by baseline and seed."""
    flop = {(run["policy"], run["seed"]): run["computed_flop"] for run in runs}
    seeds = sorted({run["seed"] for run in runs})
    return {
        name: [100 * (flop["crux", seed] / flop[name, seed] - 1) for seed in seeds]
        for name in POLICIES
        if name != "crux"
    }


def draw(results: dict[str, list[dict]], png: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(results), figsize=(9, 3.2), sharey=True, squeeze=False)
    for axis, (title, runs) in zip(axes[0], results.items(), strict=True):
        for i, (_name, values) in enumerate(gains(runs).items()):
            axis.plot([i] * len(values), values, "o", color="tab:blue", alpha=0.5, markersize=4)
            axis.plot([i - 0.25, i + 0.25], [statistics.mean(values)] * 2, color="black", linewidth=1.5)
        axis.set_xticks(range(len(gains(runs))), list(gains(runs)))
        axis.axhline(0, color="grey", linewidth=0.8)
        axis.set_title(title, fontsize=10)
    axes[0][0].set_ylabel("more computed with Crux (%)")
    figure.suptitle("Simulated: generated jobs; each point one trace, lines are means", fontsize=9)
    figure.tight_layout()
    figure.savefig(png, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("specification", type=Path, help="a cluster_spec file of Tiresias, for instance n256g8.csv")
    parser.add_argument("--span-s", type=float, default=120.0)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--json", type=Path, default=Path("results/priorities.json"))
    parser.add_argument("--png", type=Path)
    arguments = parser.parse_args()
    public = read_specification(arguments.specification)
    clusters: dict[str, Callable[[], list[dict]]] = {
        f"public: {public.switches} x {public.hosts_per_switch} hosts, 4 aggregations, 8:1": lambda: measure(
            public, 4, public.hosts_per_switch * 100e9 / 4 / 8, arguments.span_s, arguments.seeds
        ),
        "Clos: 16 x 8 hosts, 2 aggregations, 4:1": lambda: measure(
            Specification(16, 8, 8), 2, 8 * 100e9 / 2 / 4, arguments.span_s, arguments.seeds
        ),
    }
    results = {title: run() for title, run in clusters.items()}
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(results, indent=1))
    for title, runs in results.items():
        print(title)
        for name, values in gains(runs).items():
            spread = f"{min(values):+.1f} to {max(values):+.1f}"
            print(
                f"  over {name:10}: {statistics.mean(values):+.1f} % on average, {spread} % over {len(values)} traces"
            )
    if arguments.png:
        draw(results, arguments.png)


if __name__ == "__main__":
    main()
