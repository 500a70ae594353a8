"""What any planner owes its users: every input matters, names and order do not, runs repeat, searches end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from networks import GPU, clos, node
from triton_ext.planner.cluster import Cluster
from triton_ext.planner.jobs import report, study
from triton_ext.planner.jobs.baselines import ecmp
from triton_ext.planner.jobs.compression import ContentionGraph, compress
from triton_ext.planner.jobs.job import Flow, Job
from triton_ext.planner.jobs.policy import Decision, Snapshot, crux
from triton_ext.planner.jobs.simulator import Outcome, Submission, simulate
from triton_ext.planner.jobs.trace import Load, generate
from triton_ext.planner.topologies import ClosLinks
from triton_ext.planner.topologies import clos as clos_of

ROOT = Path(__file__).parents[3]


def pair() -> list[Job]:
    """Two jobs that share the host links of host0 and host2; the first sends within a node too."""
    one = Job(
        "one", 16, 9.0, 1.0, (Flow("host0", "host2", 6), Flow("host0", "host1", 2), Flow("host0", "host0", 1e9)), 0.5
    )
    two = Job("two", 16, 4.0, 0.7, (Flow("host0", "host2", 5), Flow("host3", "host2", 1)), 0.8)
    return [one, two]


def outcome(jobs: list[Job], cluster: Cluster | None = None, levels: int = 8) -> Outcome:
    cluster = cluster or clos(2, 2, 2, 10, 8)
    return simulate(cluster, [Submission(job) for job in jobs], crux, levels, 50)


@pytest.mark.parametrize(
    ("field", "value"),
    [("gpus", 8), ("compute_flop", 3.0), ("compute_s", 1.3), ("overlap_start", 0.9), ("lockstep", True)],
)
def test_every_field_of_a_job_matters(field: str, value: Any) -> None:
    one, two = pair()
    changed = outcome([replace(one, **{field: value}), two])
    before = outcome([one, two])
    assert (changed.computed_flop, changed.utilisation) != (before.computed_flop, before.utilisation)


@pytest.mark.parametrize("flow", range(3))
def test_every_flow_matters(flow: int) -> None:
    one, two = pair()
    flows = list(one.flows)
    flows[flow] = replace(flows[flow], size_bytes=3 * flows[flow].size_bytes)
    assert outcome([replace(one, flows=tuple(flows)), two]).computed_flop < outcome([one, two]).computed_flop


def test_bandwidths_and_levels_matter() -> None:
    before = outcome(pair()).computed_flop
    assert outcome(pair(), clos(2, 2, 2, 9, 8)).computed_flop < before  # hosts
    assert outcome(pair(), clos(2, 2, 2, 10, 5)).computed_flop < before  # uplinks
    slow = clos_of(
        (GPU,),
        {"p": {f"t{r}": [node(f"host{2 * r + i}", fabric_bytes_per_s=4e8) for i in (0, 1)] for r in (0, 1)}},
        ClosLinks(2, 10.0, 8.0),
    )
    assert outcome(pair(), slow).computed_flop < before  # within the node
    assert outcome(pair(), levels=1).computed_flop != before


def test_declared_communication_matters() -> None:
    cluster = clos(2, 2, 2, 10, 8)
    one, two = pair()
    before = report.plan(cluster, (one, two), 8)
    after = report.plan(cluster, (replace(one, communication_s=10.0), two), 8)
    assert [job.name for job in before.jobs] == ["one", "two"] and [job.name for job in after.jobs] == ["two", "one"]
    assert ["one", "16", "10", "as declared"] in [list(row[:4]) for row in report.rows(after)]


def renamed(job: Job, names: dict[str, str]) -> Job:
    flows = tuple(Flow(names[flow.source], names[flow.destination], flow.size_bytes) for flow in job.flows)
    return replace(job, flows=flows)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.permutations(range(5)), st.integers(1, 5))
def test_names_and_order_of_jobs_do_not_matter(seed: int, order: list[int], levels: int) -> None:
    cluster, jobs = study.random_cluster(seed)
    before = crux(Snapshot(cluster, tuple(jobs), levels))
    others = {job.name: replace(job, name=f"x{place}") for job, place in zip(jobs, order, strict=True)}
    after = crux(Snapshot(cluster, tuple(others[jobs[i].name] for i in order), levels))
    for job in jobs:
        assert after.levels[others[job.name].name] == before.levels[job.name]
        assert after.routes[others[job.name].name] == before.routes[job.name]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6))
def test_names_of_hosts_do_not_matter(seed: int) -> None:
    cluster, jobs = study.random_cluster(seed)
    names = {n.name: f"z{97 * i % 101}" for i, n in enumerate(cluster.nodes)} | {s: s for s in cluster.switches}
    other = replace(
        cluster,
        nodes=tuple(replace(n, name=names[n.name]) for n in cluster.nodes),
        links=tuple(replace(e, source=names[e.source], destination=names[e.destination]) for e in cluster.links),
    )
    after = crux(Snapshot(other, tuple(renamed(job, names) for job in jobs), 3))
    assert after == crux(Snapshot(cluster, tuple(jobs), 3))


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6))
def test_the_order_of_submissions_does_not_matter(seed: int) -> None:
    cluster, jobs = study.random_cluster(seed)
    submissions = [Submission(job, float(i), 9) for i, job in enumerate(jobs)]
    one, other = (simulate(cluster, each, crux, 3, 1e3) for each in (submissions, submissions[::-1]))
    assert one == replace(other, jobs=other.jobs[::-1])


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.01, 100))
def test_units_of_bytes_and_flop_do_not_matter(seed: int, scale: float) -> None:
    """The same cluster in other units decides the same, and computes in proportion."""
    cluster, jobs = study.random_cluster(seed)
    wide = replace(
        cluster,
        links=tuple(replace(e, bandwidth_bytes_per_s=scale * e.bandwidth_bytes_per_s) for e in cluster.links),
    )
    scaled = [
        replace(
            job,
            compute_flop=7 * job.compute_flop,
            flows=tuple(replace(flow, size_bytes=scale * flow.size_bytes) for flow in job.flows),
        )
        for job in jobs
    ]
    before = simulate(cluster, [Submission(job) for job in jobs], crux, 3, 30)
    after = simulate(wide, [Submission(job) for job in scaled], crux, 3, 30)
    assert after.computed_flop == pytest.approx(7 * before.computed_flop, rel=1e-6)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6))
def test_no_job_alone_is_slower_with_wider_links(seed: int) -> None:
    cluster, jobs = study.random_cluster(seed)
    wide = replace(
        cluster, links=tuple(replace(e, bandwidth_bytes_per_s=2 * e.bandwidth_bytes_per_s) for e in cluster.links)
    )
    for job in jobs:
        narrow, wider = (simulate(c, [Submission(job)], crux, 3, 30).computed_flop for c in (cluster, wide))
        assert wider >= narrow * (1 - 1e-9)


def test_plans_do_not_depend_on_hash_seeds(tmp_path: Path) -> None:
    example = ROOT / "examples" / "priorities"
    code = "import sys; from triton_ext.cli import app; app(sys.argv[1:])"
    plans = []
    for seed in ("1", "2"):
        file = tmp_path / f"{seed}.json"
        command = [
            "priorities",
            str(example / "jobs.yaml"),
            "--cluster",
            str(example / "cluster.yaml"),
            "--json",
            str(file),
        ]
        environment = os.environ | {"PYTHONHASHSEED": seed}
        subprocess.run([sys.executable, "-c", code, *command], env=environment, timeout=60, check=True, cwd=ROOT)
        plans.append(json.loads(file.read_text()))
    assert plans[0] == plans[1]


def test_uneven_clusters_of_any_size() -> None:
    """Three pods of unequal racks of nodes with 1, 3 and 5 devices: jobs come, run and leave."""
    pods = {
        f"p{p}": {
            f"p{p}t{r}": [node(f"p{p}t{r}h{h}", (1, 3, 5)[h % 3]) for h in range(1 + (p + r) % 4)] for r in range(5)
        }
        for p in range(3)
    }
    cluster = clos_of((GPU,), pods, ClosLinks(3, 50e9, 25e9, 75e9))
    submissions = generate(cluster, Load(5, 1.0, 10), 15, 0)
    assert len(submissions) > 5
    for policy in (crux, ecmp):
        result = simulate(cluster, submissions, policy, 3, 15)
        assert result.computed_flop > 0 and 0 < result.largest_gap_share <= 1


def test_compression_of_many_jobs_ends_soon() -> None:
    random = np.random.default_rng(0)
    edges = {
        (i, j): float(random.uniform(1, 9)) for i in range(150) for j in range(i + 1, 150) if random.random() < 0.3
    }
    levels = compress(ContentionGraph(tuple(f"j{i}" for i in range(150)), edges), 8)
    assert set(levels.values()) == set(range(8))


def test_a_policy_that_forgets_a_job_is_told_so() -> None:
    from triton_ext.errors import PlanningError

    with pytest.raises(PlanningError, match="job one no paths or no level"):
        simulate(clos(2, 2, 2, 1, 1), [Submission(pair()[0])], lambda _: Decision({}, {}), 8, 10)
