"""Generated jobs."""

from __future__ import annotations

import itertools

import pytest

from networks import clos
from triton_ext.errors import PlanningError
from triton_ext.planner.jobs.policy import crux
from triton_ext.planner.jobs.simulator import simulate
from triton_ext.planner.jobs.trace import Load, generate, rings

CLUSTER = clos(8, 8, 4, 100e9, 50e9)
LOAD = Load(6, 0.5, 20)


def test_jobs_hold_their_hosts_alone_and_repeat() -> None:
    submissions = generate(CLUSTER, LOAD, 60, seed=1)
    assert submissions == generate(CLUSTER, LOAD, 60, seed=1)
    assert submissions != generate(CLUSTER, LOAD, 60, seed=2)
    assert len(submissions) > 10
    assert sum(s.arrival_s == 0 for s in submissions) >= 3
    for one, other in itertools.combinations(submissions, 2):
        hosts, others = ({flow.source for flow in s.job.flows} for s in (one, other))
        if hosts & others:
            assert one.leaves_s <= other.arrival_s or other.leaves_s <= one.arrival_s
    for submission in submissions:
        assert submission.job.gpus == 8 * len({flow.source for flow in submission.job.flows})


def test_a_ring_sends_what_an_all_reduce_does() -> None:
    flows = rings(["a", "b", "c", "d"], 8e9, 2)
    assert len(flows) == 8 and {(f.source, f.destination) for f in flows} == {
        ("a", "b"),
        ("b", "c"),
        ("c", "d"),
        ("d", "a"),
    }
    assert sum(f.size_bytes for f in flows) == pytest.approx(4 * 2 * 3 / 4 * 8e9)
    assert rings(["a"], 8e9, 2) == ()


def test_a_trace_runs_with_theorem_1() -> None:
    submissions = generate(CLUSTER, LOAD, 20, seed=3)
    outcome = simulate(CLUSTER, submissions, crux, 8, 20)
    assert 0 < outcome.largest_gap_share <= 1 and 0 < outcome.utilisation <= 1 and outcome.decisions >= 5


def test_impossible_loads() -> None:
    with pytest.raises(PlanningError, match="-1 jobs"):
        Load(-1, 1)
