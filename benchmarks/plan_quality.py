"""How good our parallelism plans are, and how fast they are found: python benchmarks/plan_quality.py

On the public profiles, read from TRITON_EXT_DATA (../shared/data), and clusters of published devices. Nothing is
measured on a GPU: costs are our model's, and every plan is simulated beside it. Compared with Metis's published search,
and with planning that does not see that devices differ. cpu_s and near_s
are CPU time of the first process.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from parallel_plans import tell
from triton_ext.errors import PlanningError
from triton_ext.planner import presets
from triton_ext.planner.cluster import Cluster
from triton_ext.planner.parallel import metis, oracle, profile_files, space
from triton_ext.planner.parallel.pipeline import simulate
from triton_ext.planner.parallel.plan import ParallelPlan, Replica, Stage
from triton_ext.planner.parallel.profiles import Profiles
from triton_ext.planner.parallel.result import CostedPlan
from triton_ext.planner.parallel.search import SearchSettings, search

BATCH = 256
OTHERS_S = 30.0  # at most, for each of the plannings that ours is compared with


@dataclass(frozen=True)
class Case:
    model: str
    counts: dict[str, int]

    @property
    def devices(self) -> str:
        return " + ".join(f"{count} {name}" for name, count in self.counts.items())


CASES = (
    Case("OPT-350", {"A100-40": 4, "V100-16": 4}),
    Case("OPT-350", {"A100-40": 8, "V100-16": 8}),
    Case("OPT-350", {"RTX-2080": 8, "RTX-3090": 4, "Titan-RTX": 4}),
    Case("OPT-350", {"A100-40": 6, "V100-16": 5, "GH-96": 5}),
    Case("GPT-Neo-2.7", {"A100-40": 8, "V100-16": 8}),
    Case("GPT-Neo-2.7", {"A100-40": 8, "GH-96": 8}),
    Case("GPT-Neo-2.7", {"A100-40": 16, "V100-16": 16}),
)
LARGE_CASES = (
    Case("OPT-350", {"A100-40": 24, "V100-16": 24, "GH-96": 16}),
    Case("GPT-Neo-2.7", {"A100-40": 32, "V100-16": 16, "GH-96": 16}),
)
ORACLE_CASES = (
    Case("OPT-350", {"A100-40": 1, "V100-16": 1}),
    Case("OPT-350", {"A100-40": 2, "V100-16": 1}),
    Case("GPT-Neo-2.7", {"A100-40": 2, "V100-16": 1}),
    Case("OPT-350", {"A100-40": 2, "V100-16": 2}),
)


def public_profiles(model: str) -> Profiles:
    root = Path(os.environ.get("TRITON_EXT_DATA", Path(__file__).parents[2] / "shared" / "data"))
    return profile_files.read(root / "planner" / "sailor_metis_profiles", model)[0]


def our_ms(plans: Sequence[ParallelPlan] | Iterator[ParallelPlan], cluster: Cluster, profiles: Profiles) -> float:
    """The least cost of some plans, of those that fit; inf for none."""
    return oracle.exhaustive(plans, oracle.our_cost_ms(cluster, profiles)).cost_ms


def uniform_plans(cluster: Cluster, profiles: Profiles) -> Iterator[ParallelPlan]:
    """What planning for equal devices chooses from: one (dp, tp) for all stages, even layers, even samples."""
    layers = profiles.model.layers
    degrees = sorted({tp for _, tp, _ in profiles.points})
    for order, batches in itertools.product(space.orders(cluster), space.divisors(BATCH)):
        count, samples = len(order.devices), BATCH // batches
        for stages, tp in itertools.product(space.divisors(count), degrees):
            dp, rest = divmod(count // stages, tp)
            if stages > layers or rest or not dp or samples % dp:
                continue
            sizes = [layers // stages + (stage < layers % stages) for stage in range(stages)]
            edges = [0, *itertools.accumulate(sizes)]
            parts = [order.devices[i : i + tp] for i in range(0, count, tp)]
            yield ParallelPlan(
                tuple(
                    Stage(a, b, tuple(Replica(part, samples // dp) for part in parts[s * dp : (s + 1) * dp]))
                    for s, (a, b) in enumerate(itertools.pairwise(edges))
                ),
                batches,
                BATCH,
            )


def as_the_slowest_ms(cluster: Cluster, profiles: Profiles) -> float:
    """The best plan for a cluster of nothing but its slowest devices, run on the real one."""

    def whole_ms(name: str) -> float:
        return min(sum(p.layer_ms) * tp / samples for (t, tp, samples), p in profiles.points.items() if t == name)

    slowest = max((kind.name for kind in cluster.device_types), key=whole_ms)
    least = min(kind.memory_bytes for kind in cluster.device_types)
    kind = replace(cluster.device_type(slowest), memory_bytes=least)
    nodes = tuple(replace(node, device_types=(slowest,) * len(node.device_types)) for node in cluster.nodes)
    seen = Cluster((kind,), nodes, cluster.switches, cluster.links)
    found = search(profiles, seen, BATCH, SearchSettings(plans=50, time_limit_s=OTHERS_S))
    for candidate in found.plans:  # the first one whose replicas are profiled on the real devices, too
        if (cost_ms := our_ms([candidate.plan], cluster, profiles)) < math.inf:
            return cost_ms
    return math.inf


def quality(case: Case, time_limit_s: float, processes: int) -> dict[str, Any]:
    """Our plan beside those of others, all under our cost model; and ours and Metis's under Metis's. near_s: CPU
    seconds until the best plan so far was within 1 % of the final one."""
    profiles, cluster = public_profiles(case.model), presets.cluster(case.counts)
    begin_s, wall_s = time.process_time(), time.perf_counter()
    so_far: list[tuple[float, float]] = []
    found = search(
        profiles,
        cluster,
        BATCH,
        SearchSettings(time_limit_s=time_limit_s, processes=processes),
        lambda progress: so_far.append((time.process_time() - begin_s, progress.best_ms)),
    )
    cpu_s, wall_s = time.process_time() - begin_s, time.perf_counter() - wall_s
    published = metis.search(profiles, cluster, BATCH, metis.MetisSettings(time_limit_s=OTHERS_S))
    best = found.best
    if best is None or published.best is None:
        raise PlanningError(f"{case}: no plan")
    seeds = (published.best.plan,)
    exact = search(profiles, cluster, BATCH, SearchSettings(cost="metis", time_limit_s=OTHERS_S, seeds=seeds))
    if exact.best is None:
        raise PlanningError(f"{case}: no plan under Metis's cost")
    ours_ms = best.cost.total_ms
    simulated_ms = simulate(best.plan, cluster, profiles).step_time_s * 1e3
    uniform_ms = our_ms(uniform_plans(cluster, profiles), cluster, profiles)
    blind_ms = as_the_slowest_ms(cluster, profiles)
    metis_ms = our_ms([published.best.plan], cluster, profiles)
    return {
        "model": case.model,
        "devices": case.devices,
        "ours_ms": round(ours_ms, 1),
        "simulated_ms": round(simulated_ms, 1),
        "gap": f"{found.gap:.1%}" if not found.proven else "proven",
        "near_s": round(next(second for second, best_ms in so_far if best_ms <= 1.01 * ours_ms), 2),
        "cpu_s": round(cpu_s, 2),
        "wall_s": round(wall_s, 2),
        "plan": shown(best),
        "metis": ratio(metis_ms, ours_ms),
        "uniform": ratio(uniform_ms, ours_ms),
        "as slowest": ratio(blind_ms, ours_ms),
        "metis cost of Metis": round(published.best.cost.total_ms, 1),
        "and of ours": round(exact.best.cost.total_ms, 1),
        "proven": exact.proven,
    }


def ratio(other_ms: float, ours_ms: float) -> str:
    return f"{other_ms / ours_ms:.2f}x" if other_ms < math.inf else "no plan"


def shown(best: CostedPlan) -> str:
    stages = " ".join(f"{s.end - s.begin}L/dp{s.dp}tp{s.tp}" for s in best.plan.stages)
    return f"{best.plan.microbatches} x ({stages})"


def against_oracle(case: Case, time_limit_s: float) -> dict[str, Any]:
    """Our optimum and that of all plans, one after another."""
    profiles, cluster = public_profiles(case.model), presets.cluster(case.counts)
    begin_s = time.perf_counter()
    truth = oracle.exhaustive(
        oracle.plans(cluster, profiles, BATCH), oracle.our_cost_ms(cluster, profiles), time_limit_s
    )
    oracle_s = time.perf_counter() - begin_s
    found = search(profiles, cluster, BATCH, SearchSettings(price_limit=10_000))
    ours_ms = found.best.cost.total_ms if found.best else math.inf
    return {
        "model": case.model,
        "devices": case.devices,
        "plans": truth.costed,
        "oracle ended": truth.complete,
        "oracle_ms": round(truth.cost_ms, 3),
        "ours_ms": round(ours_ms, 3),
        "equal": truth.complete and math.isclose(ours_ms, truth.cost_ms, rel_tol=1e-9),
        "proven": found.proven,
        "oracle_s": round(oracle_s, 1),
        "ours_s": round(found.elapsed_s, 2),
    }


def each(title: str, rows: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows that are told as they come."""
    found = []
    for row in rows:
        print(json.dumps(row), flush=True)
        found.append(row)
    tell(title, found)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", choices=("plans", "large", "oracle"), default=["plans"])
    parser.add_argument("--time-limit", type=float, default=30.0, help="of our search, in seconds of wall time")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--json", type=Path, help="where to write the rows")
    given = parser.parse_args()
    title = f"Plans for a batch of {BATCH}, and how many times as long a step of other planning takes"
    tables = {}
    for name, cases in (("plans", CASES), ("large", LARGE_CASES)):
        if name in given.tables:
            tables[name] = each(title, (quality(case, given.time_limit, given.processes) for case in cases))
    if "oracle" in given.tables:
        tables["oracle"] = each("Against every plan", (against_oracle(case, 600.0) for case in ORACLE_CASES))
    if given.json:
        given.json.write_text(json.dumps(tables, indent=2) + "\n")


if __name__ == "__main__":
    main()
