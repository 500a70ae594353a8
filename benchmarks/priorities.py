"""Simulated gains of Crux over the baselines on generated jobs: python benchmarks/priorities.py

Nothing here is measured on a cluster. The public list of hosts is read from TRITON_EXT_DATA (../shared/data); its
speeds are assumptions. Writes a JSON of all runs, and the picture in docs/priorities.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from triton_ext.planner import presets
from triton_ext.planner.cluster import Cluster, Fabric, Node
from triton_ext.planner.jobs.baselines import BASELINES, shortest_first, sincronia, time_shift
from triton_ext.planner.jobs.job import Flow, Job, Routes
from triton_ext.planner.jobs.path_selection import select_paths
from triton_ext.planner.jobs.policy import Decision, Policy, Snapshot, crux
from triton_ext.planner.jobs.simulator import Submission, simulate
from triton_ext.planner.jobs.trace import Load, generate
from triton_ext.planner.topologies import ClosLinks, lingjun, two_layers

LEVELS = 8
DEVICE = presets.device_type("A100-80")
HOST = Node("host", (DEVICE.name,) * 8, Fabric(300e9, 3e-6))
HOST_BYTES_PER_S = 100e9  # 8 cards of 100 Gbit/s
LIGHT, HEAVY = Load(30, 0.5), Load(60, 1.0)
SCATTERED = Load(60, 1.0, fragmentation=16)


def planned(snapshot: Snapshot) -> Routes:
    """Crux's paths."""
    return select_paths(snapshot.cluster, snapshot.jobs)


def crux_paths(snapshot: Snapshot) -> Decision:
    """Crux without priorities: what its paths alone bring."""
    routes = planned(snapshot)
    return Decision(routes, dict.fromkeys(routes, 0))


POLICIES: dict[str, Policy] = {
    "crux": crux,
    **BASELINES,
    "its paths": crux_paths,
    "SJF, its paths": partial(shortest_first, paths=planned),
    "Sincronia, its paths": partial(sincronia, paths=planned),
    "shift, its paths": partial(time_shift, paths=planned),
}


@dataclass
class Timed:
    """A policy that counts the seconds spent in it."""

    policy: Policy
    seconds: float = 0.0

    def __call__(self, snapshot: Snapshot) -> Decision:
        begin_s = time.process_time()
        decision = self.policy(snapshot)
        self.seconds += time.process_time() - begin_s
        return decision


def two_layer_clos() -> Cluster:
    """The switches of the paper's two-layer network; hosts and speeds assumed: 4 a rack, 2:1 oversubscribed."""
    return two_layers(DEVICE, HOST, 173, 4, ClosLinks(16, HOST_BYTES_PER_S, 12.5e9))


def public_hosts(uplink_bytes_per_s: float) -> Cluster | None:
    """The public list of hosts; 8 aggregation switches a pod, and cores that take all they carry, are assumed."""
    data = Path(os.environ.get("TRITON_EXT_DATA", Path(__file__).parents[2] / "shared" / "data"))
    table = data / "planner" / "lingjun2023" / "topo.csv"
    if not table.is_file():
        print(f"{table} is not there: the public hosts are left out; TRITON_EXT_DATA names the folder of the data")
        return None
    core_bytes_per_s = 8 * uplink_bytes_per_s
    return lingjun(table, DEVICE, HOST, ClosLinks(8, HOST_BYTES_PER_S, uplink_bytes_per_s, core_bytes_per_s))


def measure(cluster: Cluster, load: Load, span_s: float, seeds: range) -> list[dict[str, Any]]:
    runs = []
    for seed in seeds:
        submissions = generate(cluster, load, span_s, seed)
        for name, policy in POLICIES.items():
            timed = Timed(policy)
            began_s = time.process_time()
            outcome = simulate(cluster, submissions, timed, LEVELS, span_s, seed)
            simulator_s = time.process_time() - began_s - timed.seconds
            run = {
                "seed": seed,
                "policy": name,
                "jobs": len(submissions),
                "computed_flop": outcome.computed_flop,
                "utilisation": outcome.utilisation,
                "flow_events": outcome.flow_events,
                "simulator_s": simulator_s,
                "policy_s": timed.seconds,
                "decisions": outcome.decisions,
                "largest_gap_share": outcome.largest_gap_share,
            }
            print(json.dumps(run), flush=True)
            runs.append(run)
    return runs


def events_per_s() -> float:
    """Flow events a second of processor time: 12 jobs on 64 hosts of 8 rails, whose rings have equal flows, as
    collectives do."""
    cluster = two_layers(DEVICE, HOST, 8, 8, ClosLinks(4, 100e9, 200e9))
    random = np.random.default_rng(0)
    submissions = []
    for i, count in enumerate((16, 16, 8, 8, 8, 4, 4, 4, 2, 2, 2, 2)):
        hosts = [f"host{h}" for h in random.choice(64, count, replace=False)]
        flows = tuple(Flow(a, b, 2e9) for a, b in zip(hosts, hosts[1:] + hosts[:1], strict=True) for _ in range(8))
        flop, compute_s = random.uniform(1e15, 9e15), random.uniform(0.2, 1)
        submissions.append(Submission(Job(f"j{i}", 8 * count, float(flop), float(compute_s), flows), float(i)))
    began_s = time.process_time()
    outcome = simulate(cluster, submissions, crux, LEVELS, 300)
    return outcome.flow_events / (time.process_time() - began_s)


def gains(runs: list[dict[str, Any]]) -> dict[str, list[float]]:
    """How much more is computed with Crux, in percent, by baseline and seed."""
    flop = {(run["policy"], run["seed"]): run["computed_flop"] for run in runs}
    seeds = sorted({run["seed"] for run in runs})
    return {
        name: [100 * (flop["crux", seed] / flop[name, seed] - 1) for seed in seeds]
        for name in POLICIES
        if name != "crux"
    }


def tell(title: str, runs: list[dict[str, Any]]) -> None:
    speed = sum(run["flow_events"] for run in runs) / sum(run["simulator_s"] for run in runs)
    used = [run["utilisation"] for run in runs if run["policy"] == "crux"]
    print(f"{title}: {speed:,.0f} flow events a second; with Crux GPUs compute {min(used):.1%} to {max(used):.1%}")
    for name, values in gains(runs).items():
        deviation = statistics.stdev(values) if len(values) > 1 else 0.0
        spread = f"standard deviation {deviation:.1f}, {min(values):+.1f} to {max(values):+.1f}"
        print(f"  over {name:20}: {statistics.mean(values):+.1f} %, {spread}, {len(values)} traces")


def draw(results: dict[str, list[dict[str, Any]]], png: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(results), figsize=(2.9 * len(results), 4), sharey=True, squeeze=False)
    for axis, (title, runs) in zip(axes[0], results.items(), strict=True):
        for i, values in enumerate(gains(runs).values()):
            axis.plot([i] * len(values), values, "o", color="tab:blue", alpha=0.5, markersize=4)
            axis.plot([i - 0.3, i + 0.3], [statistics.mean(values)] * 2, color="black", linewidth=1.5)
        axis.set_xticks(range(len(gains(runs))), list(gains(runs)), rotation=60, ha="right", rotation_mode="anchor")
        axis.axhline(0, color="grey", linewidth=0.8)
        axis.set_title(title.replace(", ", "\n"), fontsize=9)
    axes[0][0].set_ylabel("more computed with Crux, %")
    figure.suptitle("Simulated: Crux against other policies; a point is a trace, a line the mean", fontsize=10)
    figure.tight_layout()
    figure.savefig(png, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--span-s", type=float, default=20.0)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--json", type=Path, default=Path("results/priorities.json"))
    parser.add_argument("--png", type=Path)
    arguments = parser.parse_args()
    print(f"twelve jobs, flows on their own: {events_per_s():,.0f} flow events a second")
    two_layer, public, narrow = two_layer_clos(), public_hosts(50e9), public_hosts(12.5e9)
    cases = [
        ("Clos of 173 racks, light", two_layer, LIGHT),
        ("Clos of 173 racks, heavy", two_layer, HEAVY),
        ("847 public hosts, light", public, LIGHT),
        ("847 public hosts, heavy", public, HEAVY),
        ("847 public hosts, scattered, 8:1", narrow, SCATTERED),
    ]
    seeds = range(100, 100 + arguments.seeds)
    results = {title: measure(at, load, arguments.span_s, seeds) for title, at, load in cases if at is not None}
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(results, indent=1))
    for title, runs in results.items():
        tell(title, runs)
    if arguments.png:
        draw(results, arguments.png)


if __name__ == "__main__":
    main()
