"""Generated jobs, and the file of a cluster's specification."""

from __future__ import annotations

from pathlib import Path

import pytest

from triton_ext.errors import PlanningError
from triton_ext.planner.jobs.policy import crux
from triton_ext.planner.jobs.simulator import simulate
from triton_ext.planner.jobs.trace import Specification, generate, read_specification


def test_generated_jobs_fill_the_hosts_once() -> None:
    specification = Specification(8, 8, 4)
    submissions = generate(specification.hosts(), 4, 60, seed=1)
    assert (
        submissions == generate(specification.hosts(), 4, 60, seed=1) != generate(specification.hosts(), 4, 60, seed=2)
    )
    assert sum(s.job.gpus for s in submissions) == int(0.9 * 64) * 4
    senders = [flow.source for s in submissions for flow in s.job.flows]
    assert len(senders) == len(set(senders))
    assert all(0 <= s.arrival_s <= 30 for s in submissions)


def test_a_trace_runs_with_theorem_1() -> None:
    specification = Specification(4, 8, 8)
    submissions = generate(specification.hosts(), 8, 20, seed=3)
    outcome = simulate(specification.network(2, 100e9, 100e9), submissions, crux, 8, 20)
    assert 0 < outcome.largest_gap_share <= 1 and 0 < outcome.utilisation <= 1 and outcome.decisions >= len(submissions)


def test_specification_of_a_cluster(tmp_path: Path) -> None:
    (file := tmp_path / "spec.csv").write_text("num_switch,num_node_p_switch,num_gpu_p_node,other\n2,3,4,9\n")
    specification = read_specification(file)
    assert specification == Specification(2, 3, 4)
    assert len(specification.hosts()) == 6
    assert len(specification.network(2, 1, 1).paths("host0", "host5")) == 2
    file.write_text("num_switch\n2\n")
    with pytest.raises(PlanningError, match="num_node_p_switch"):
        read_specification(file)
