"""The algorithms against the paper's examples, brute force and their own rules."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from networks import clos, line
from triton_ext.errors import ClusterError, PlanningError
from triton_ext.planner.jobs.assignment import Cycle, correction_factor, priorities, share_link
from triton_ext.planner.jobs.compression import (
    EXACT_JOBS,
    ContentionGraph,
    compress,
    compress_top,
    contention_graph,
    cut_order,
    topological_order,
)
from triton_ext.planner.jobs.job import Flow, Job, candidates, intensity_flop_per_s, transmit_s
from triton_ext.planner.jobs.path_selection import select_paths

ONE, TWO = Cycle(2, 2), Cycle(1, 1)  # the paper's first example
HALF_ONE, HALF_TWO = Cycle(4, 1, 0.5), Cycle(2, 3, 0.5)  # and its second


def test_errors_name_what_is_wrong() -> None:
    with pytest.raises(PlanningError, match="overlap_start is 2"):
        Job("j", 1, 1, 1, overlap_start=2)
    for number in (-1, 0.0, math.inf, math.nan):
        for field in ("compute_flop", "compute_s", "communication_s"):
            with pytest.raises(PlanningError, match=f"job j: {field} is {number}"):
                replace(Job("j", 1, 1, 1), **{field: number})
    with pytest.raises(PlanningError, match="named j"):
        select_paths(line(1), [Job("j", 1, 1, 1), Job("j", 1, 1, 1)])
    with pytest.raises(PlanningError, match="0 priority levels"):
        compress(ContentionGraph(("a",), {}), 0)
    with pytest.raises(ClusterError, match="no node is named 'n9'"):
        select_paths(line(1), [Job("j", 1, 1, 1, (Flow("n0", "n9", 1),))])


def test_intensity_is_over_the_slowest_link() -> None:
    cluster = line(10, 2)
    job = Job("j", 8, 300, 1, (Flow("n0", "n2", 20), Flow("n0", "n1", 100)))
    paths = tuple(candidates(cluster, f)[0] for f in job.flows)
    assert transmit_s(cluster, job, paths) == 12  # 120 bytes at 10, 20 bytes at 2
    assert intensity_flop_per_s(cluster, job, paths) == 25
    assert intensity_flop_per_s(cluster, Job("quiet", 1, 1, 1), ()) == math.inf


def test_intense_jobs_choose_first_and_apart() -> None:
    cluster = clos(2, 2, 2, 10, 5)
    jobs = [
        Job(n, 8, w, 1, (Flow(s, d, 10),)) for n, w, s, d in (("a", 5, "host0", "host2"), ("b", 9, "host1", "host3"))
    ]
    routes = select_paths(cluster, jobs)
    assert routes == select_paths(cluster, jobs[::-1])
    assert routes["b"][0] == candidates(cluster, jobs[1].flows[0])[0]
    assert not set(routes["a"][0]) & set(routes["b"][0])


def test_first_example_of_the_paper() -> None:
    for start_s in (12, 15, 24.5):
        one_first = share_link(ONE, TWO, start_s, start_s + 12)
        two_first = share_link(TWO, ONE, start_s, start_s + 12)[::-1]
        assert [s.transmit_s for s in one_first] == pytest.approx([6, 3])
        assert [12 - s.compute_s for s in one_first] == pytest.approx([6, 9])  # idle
        assert [s.transmit_s for s in two_first] == pytest.approx([4, 6])
        assert sum(s.compute_s for s in one_first) / 24 == pytest.approx(0.375)
        assert sum(s.compute_s for s in two_first) / 24 == pytest.approx(10 / 24)
    assert correction_factor(ONE, TWO) == pytest.approx(1.5)


def test_second_example_of_the_paper() -> None:
    for start_s in (0, 1):
        assert 13 - start_s - share_link(HALF_ONE, HALF_TWO, start_s, 13)[1].compute_s == pytest.approx(7)
        assert 13 - start_s - share_link(HALF_TWO, HALF_ONE, start_s, 13)[0].compute_s == pytest.approx(6)
    # In the steady state the two interleave, and the order does not matter.
    for first, second, two in ((HALF_ONE, HALF_TWO, 1), (HALF_TWO, HALF_ONE, 0)):
        assert 12 - share_link(first, second, 24, 36)[two].compute_s == pytest.approx(6)
    assert correction_factor(HALF_ONE, HALF_TWO) == 1


@settings(max_examples=30, deadline=None)
@given(*[st.floats(0.1, 5)] * 4, st.floats(0, 1), st.floats(0, 1))
def test_one_link_is_shared_lawfully(a: float, b: float, c: float, d: float, u: float, v: float) -> None:
    first, second = Cycle(a, b, u), Cycle(c, d, v)
    start_s, end_s = 3.0, 40.0
    shares = share_link(first, second, start_s, end_s)
    alone = share_link(first, Cycle(1000, 1), start_s, end_s)[0]
    assert shares[0].transmit_s == pytest.approx(alone.transmit_s)  # the first never waits
    assert sum(s.transmit_s for s in shares) <= end_s - start_s + 1e-6
    assert all(0 <= s.compute_s <= end_s - start_s + 1e-6 for s in shares)
    assert 0 < correction_factor(first, second) < math.inf


@pytest.mark.parametrize("ratio", [1e2, 1e3, 6e4, 1e12, 1e300])
def test_very_unlike_periods_are_simulated_for_a_bounded_number_of_events(
    ratio: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long cycle sees the short one as a steady stream of 0.4 of the link: its traffic takes 1 / 0.6 as long."""
    events = 0

    def counted(*values: object) -> object:  # the simulation of a pair takes the least of the next events, each time
        nonlocal events
        events += 1
        assert events < 50_000
        return min(*values)

    monkeypatch.setattr("triton_ext.planner.jobs.assignment.min", counted, raising=False)
    short, long = Cycle(0.6, 0.4), Cycle(0.5 * ratio, 0.5 * ratio)
    short_gain, long_gain = 0.4 * 0.5, 0.5 - 0.5 / (0.5 + 0.5 / 0.6)  # seconds of the link, a second
    assert correction_factor(long, short) == pytest.approx(short_gain / long_gain, rel=0.02)
    events = 0
    assert correction_factor(short, long) == pytest.approx(long_gain / short_gain, rel=0.02)
    assert events > 1000


def test_priorities_correct_the_intensity() -> None:
    cluster = line(1)
    one = Job("one", 10, 10, 2, (Flow("n0", "n1", 2),))
    two = Job("two", 10, 5, 1, (Flow("n0", "n1", 1),))
    quiet = Job("quiet", 10, 5, 1)
    routes = select_paths(cluster, [one, two, quiet])
    # Equal intensities and equal traffic per second: "one" is the reference, by name.
    assert priorities(cluster, [two, quiet, one], routes) == pytest.approx({"one": 5, "two": 7.5, "quiet": math.inf})


def test_figure_13() -> None:
    graph = ContentionGraph(("1", "2", "3", "4"), {(0, 1): 4.0, (2, 3): 2.0})
    best, top = compress(graph, 2), compress_top(graph, 2)
    even = {name: i // 2 for i, name in enumerate(graph.names)}  # as Varys does
    assert best == {"1": 0, "3": 0, "2": 1, "4": 1}
    assert top == {"1": 0, "2": 1, "3": 1, "4": 1}
    assert even == {"1": 0, "2": 0, "3": 1, "4": 1}
    assert [graph.loss_flop_per_s(levels) for levels in (best, top, even)] == [0, 2, 6]
    assert graph.is_valid(top) and not graph.is_valid({"1": 1, "2": 0, "3": 0, "4": 0})


def random_graph(count: int, random: np.random.Generator) -> ContentionGraph:
    intensity = np.sort(random.uniform(1, 10, count))[::-1]
    edges = {(i, j): float(intensity[i]) for i, j in itertools.combinations(range(count), 2) if random.random() < 0.5}
    return ContentionGraph(tuple(f"j{i}" for i in range(count)), edges)


def brute_force_loss(graph: ContentionGraph, levels: int) -> float:
    count = len(graph.names)
    choices = (dict(zip(graph.names, c, strict=True)) for c in itertools.product(range(levels), repeat=count))
    return min(graph.loss_flop_per_s(c) for c in choices if graph.is_valid(c))


def test_small_cuts_are_optimal_and_sampled_ones_nearly() -> None:
    random = np.random.default_rng(1)
    ratios = []
    for case in range(60):
        graph, levels = random_graph(5 + case % 3, random), 2 + case % 2
        least = brute_force_loss(graph, levels)
        assert graph.loss_flop_per_s(compress(graph, levels)) == pytest.approx(least)
        total = sum(graph.edges.values())
        cut = max(cut_order(graph, topological_order(graph, random), levels)[0] for _ in range(10))
        ratios.append(1.0 if total == least else cut / (total - least))
    assert max(ratios) <= 1 + 1e-9
    assert np.mean(ratios) > 0.99


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 20), st.integers(1, 9), st.integers(0, 1000))
def test_every_cut_is_valid(count: int, levels: int, seed: int) -> None:
    graph = random_graph(count, np.random.default_rng(seed))
    order = topological_order(graph, np.random.default_rng(seed))
    assert sorted(order) == list(range(count))
    value, result = cut_order(graph, order, levels)
    chosen = dict(zip(graph.names, result, strict=True))
    assert graph.is_valid(chosen)
    assert value == pytest.approx(sum(graph.edges.values()) - graph.loss_flop_per_s(chosen))
    final = compress(graph, levels, seed)
    assert graph.is_valid(final) and set(final.values()) <= set(range(levels))
    assert compress(graph, levels, seed) == final
    assert set(final.values()) == set(range(max(final.values()) + 1))
    if count > EXACT_JOBS:
        assert graph.loss_flop_per_s(final) <= graph.loss_flop_per_s(compress(graph, 1)) + 1e-9


def test_jobs_that_share_a_link_contend() -> None:
    cluster = line(1, 1)
    jobs = [
        Job(n, 1, w, 1, (Flow(s, d, 1),))
        for n, w, s, d in (("a", 3, "n0", "n2"), ("b", 2, "n0", "n1"), ("c", 1, "n1", "n2"))
    ]
    graph = contention_graph(cluster, jobs, select_paths(cluster, jobs), ("a", "b", "c"))
    assert graph.edges == {(0, 1): 3.0, (0, 2): 3.0}
