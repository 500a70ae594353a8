"""The baselines' own rules, the exhaustive optimum, and Crux's nearness to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple

import numpy as np
import pytest

from networks import clos, one_way, wire
from triton_ext.errors import PlanningError
from triton_ext.planner.jobs import study
from triton_ext.planner.jobs.baselines import (
    bottleneck_order,
    ecmp,
    farthest_first,
    hashed_paths,
    shortest_first,
    sincronia,
    time_shift,
)
from triton_ext.planner.jobs.exhaustive import Evaluation, count_weak_orders, exhaustive, weak_orders
from triton_ext.planner.jobs.job import Flow, Job, candidates
from triton_ext.planner.jobs.policy import Alignment, Decision, Policy, Snapshot, crux
from triton_ext.planner.jobs.simulator import Submission, simulate

WIRE = wire()
POLICIES = (crux, ecmp, shortest_first, sincronia, time_shift, farthest_first)


def job(name: str, compute_s: float, size_bytes: float, flop: float = 1.0) -> Job:
    return Job(name, 1, flop, compute_s, (Flow("a", "b", size_bytes),))


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_are_pure_and_complete(policy: Policy) -> None:
    cluster, jobs = study.random_cluster(3)
    decision = policy(Snapshot(cluster, tuple(jobs), 3, seed=5))
    again = policy(Snapshot(cluster, tuple(jobs[::-1]), 3, seed=5))
    assert decision == again
    assert set(decision.routes) == set(decision.levels) == {j.name for j in jobs}
    assert set(decision.levels.values()) <= {0, 1, 2}
    for j in jobs:
        for flow, path in zip(j.flows, decision.routes[j.name], strict=True):
            assert path in candidates(cluster, flow)


def test_hashes_spread_over_the_paths_and_depend_on_the_seed() -> None:
    cluster = clos(2, 1, 4, 1, 1)
    many = Job("j", 1, 1, 1, tuple(Flow("host0", "host1", 1) for _ in range(400)))
    first = hashed_paths(Snapshot(cluster, (many,), 1, 0))["j"]
    counts = [first.count(path) for path in candidates(cluster, many.flows[0])]
    assert min(counts) > 60 and sum(counts) == 400
    assert first != hashed_paths(Snapshot(cluster, (many,), 1, 1))["j"]


def test_shortest_first_by_traffic() -> None:
    jobs = (job("a", 1, 3), job("b", 9, 1), job("c", 1, 2))
    assert shortest_first(Snapshot(WIRE, jobs, 2)).levels == {"b": 0, "c": 1, "a": 1}


@pytest.mark.parametrize("policy", [shortest_first, sincronia, time_shift])
def test_baselines_take_other_paths(policy: Callable[..., Decision]) -> None:
    cluster, jobs = study.random_cluster(3)
    routes = crux(Snapshot(cluster, tuple(jobs), 3)).routes
    assert policy(Snapshot(cluster, tuple(jobs), 3), paths=lambda _: routes).routes == routes


def test_a_job_is_shifted_once() -> None:
    """The second comes while the first runs: the first keeps its place, and the second gets out of its way."""
    jobs = (job("a", 1, 1), job("b", 1, 1))
    known = {"a": Alignment(2, 0.5)}
    decided = time_shift(Snapshot(WIRE, jobs, 1, alignments=known)).alignments
    assert decided["a"] == known["a"] and decided["b"].offset_s == pytest.approx(1.5)


def test_sincronia_by_hand() -> None:
    # One link: the largest is last. Two links: the order of the busiest one counts, with scaled weights.
    jobs = [job("a", 1, 3), job("b", 1, 1), job("c", 1, 2)]
    routes = hashed_paths(Snapshot(WIRE, tuple(jobs), 3))
    assert bottleneck_order(WIRE, jobs, routes) == ("b", "c", "a")
    two = one_way(("a", "b", 1.0), ("c", "d", 1.0), nodes=("a", "b", "c", "d"))
    x = Job("x", 1, 1, 1, (Flow("a", "b", 4), Flow("c", "d", 1)))
    y = Job("y", 1, 1, 1, (Flow("a", "b", 2), Flow("c", "d", 6)))
    z = Job("z", 1, 1, 1, (Flow("a", "b", 3),))
    routes = hashed_paths(Snapshot(two, (x, y, z), 3))
    # a -> b carries 9: x is last (1/4); then y's weight is 1 - 2/4, z's 1 - 3/4; c -> d has 6, a -> b 5: y is next.
    assert bottleneck_order(two, [x, y, z], routes) == ("z", "y", "x")


def test_time_shift_interleaves_what_fits() -> None:
    jobs = (job("a", 1, 1), job("b", 1, 1))
    shifted = simulate(WIRE, [Submission(j) for j in jobs], time_shift, 1, 40)
    assert {a.offset_s for a in time_shift(Snapshot(WIRE, jobs, 1)).alignments.values()} == {0, 1}
    assert shifted.computed_flop >= 39  # each all but alone
    together = simulate(WIRE, [Submission(j) for j in jobs], ecmp, 1, 40)
    assert together.computed_flop < 30


def test_farthest_first_gives_long_flows_the_choice() -> None:
    links = [("s", "m", 1), ("m", "x", 1), ("s", "n", 1), ("n", "x", 1), ("x", "t", 9), ("x", "y", 9), ("y", "u", 9)]
    cluster = one_way(*links, nodes=("s", "t", "u"))
    near = Job("a", 1, 1, 1, (Flow("s", "t", 1),))
    far = Job("b", 1, 1, 1, (Flow("s", "u", 1),))
    routes = farthest_first(Snapshot(cluster, (near, far), 1)).routes
    assert routes["b"][0] == candidates(cluster, far.flows[0])[0]
    assert routes["a"][0] == candidates(cluster, near.flows[0])[1]


def test_weak_orders() -> None:
    assert [len(list(weak_orders(n, n))) for n in (1, 2, 3, 4)] == [1, 3, 13, 75]
    assert len(list(weak_orders(5, 3))) == 181


def test_groups_apart_are_as_good_as_together() -> None:
    for seed in range(6):
        cluster, jobs = study.random_cluster(seed)
        evaluation = Evaluation(cluster, jobs, periods=8)
        decision = crux(Snapshot(cluster, tuple(jobs), 3))
        whole = simulate(cluster, [Submission(j) for j in jobs], lambda _, d=decision: d, 3, evaluation.end_s)
        apart = evaluation.flop_per_s(decision.routes, decision.levels) * evaluation.end_s
        assert apart == pytest.approx(whole.computed_flop)


def test_nothing_beats_the_optimum() -> None:
    for seed in range(3):
        cluster, jobs = study.random_cluster(seed)
        snapshot = Snapshot(cluster, tuple(jobs[:4]), 3)
        evaluation = Evaluation(cluster, jobs[:4])
        best = exhaustive(snapshot)
        value = evaluation.flop_per_s(best.routes, best.levels)
        for policy in (crux, ecmp, shortest_first, sincronia, farthest_first):
            other = policy(snapshot)
            assert evaluation.flop_per_s(other.routes, other.levels) <= value * (1 + 1e-9)


def test_too_many_choices_are_refused() -> None:
    cluster = clos(2, 1, 4, 1, 1)
    many = Job("j", 1, 1, 1, tuple(Flow("host0", "host1", 1) for _ in range(20)))
    with pytest.raises(PlanningError, match="too many"):
        exhaustive(Snapshot(cluster, (many,), 1))


def test_choices_of_levels_count_too() -> None:
    """All jobs on one path: nothing to choose but levels, of which there are very many."""
    assert all(count_weak_orders(n, k) == len(list(weak_orders(n, k))) for n in range(1, 6) for k in range(1, 8))
    jobs = tuple(Job(f"j{i}", 1, 1, 1, (Flow("a", "b", 1),)) for i in range(12))
    for count, levels, orders in ((7, 8, 47293), (12, 3, 523251)):
        assert count_weak_orders(count, levels) == orders
        with pytest.raises(PlanningError, match=f"1 choices of paths and {orders} of levels are too many to try"):
            exhaustive(Snapshot(wire(), jobs[:count], levels))
    assert set(exhaustive(Snapshot(wire(), jobs, 1)).levels.values()) == {0}


def check_nearness(count: int) -> None:
    """0.97 of the optimum on average, and nearer than without the algorithm."""
    found = np.array([astuple(study.nearness(seed)) for seed in range(count)])
    assert found.max() <= 1 + 1e-9
    ours, without = found.mean(axis=0)[:3], found.mean(axis=0)[3:]
    assert np.all(ours >= 0.97), ours
    assert np.all(ours > without), (ours, without)


def test_each_algorithm_is_near_the_optimum() -> None:
    check_nearness(60)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_each_algorithm_is_near_the_optimum_in_1500_clusters() -> None:
    check_nearness(1500)
