"""The simulator of flows: rates, iterations, the paper's first example, theorem 1 in every run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from networks import clos, one_way, wire
from triton_ext.errors import PlanningError
from triton_ext.planner.cluster import Cluster
from triton_ext.planner.jobs.fairness import Usage, fair_rates
from triton_ext.planner.jobs.job import Flow, Job
from triton_ext.planner.jobs.path_selection import select_paths
from triton_ext.planner.jobs.policy import Alignment, Decision, Policy, Snapshot, crux
from triton_ext.planner.jobs.simulator import Outcome, Submission, simulate

WIRE = wire()


def job(name: str, gpus: int, flop: float, compute_s: float, size_bytes: float, overlap_start: float = 1) -> Job:
    return Job(name, gpus, flop, compute_s, (Flow("a", "b", size_bytes),), overlap_start)


def fixed(levels: dict[str, int], alignments: dict[str, Alignment] | None = None) -> Policy:
    def policy(snapshot: Snapshot) -> Decision:
        return Decision(select_paths(snapshot.cluster, snapshot.jobs), levels, alignments or {})

    return policy


def run(jobs: list[Job], levels: dict[str, int], end_s: float) -> Outcome:
    return simulate(WIRE, [Submission(j) for j in jobs], fixed(levels), 8, end_s)


def usage(links: list[list[int]]) -> Usage:
    """Streams of a flow each, by the links that it uses."""
    entries = [(stream, link) for stream, row in enumerate(links) for link in row]
    return Usage(np.array([e[0] for e in entries]), np.array([e[1] for e in entries]), np.ones(len(entries)))


def test_rates_by_hand() -> None:
    used = usage([[0], [0, 1], [1]])
    bandwidths = np.array([10.0, 4.0])
    assert fair_rates(used, np.array([0, 0, 0]), bandwidths) == pytest.approx([8, 2, 2])
    assert fair_rates(used, np.array([1, 0, 1]), bandwidths) == pytest.approx([6, 4, 0])
    assert fair_rates(used, np.array([0, 2, 1]), bandwidths) == pytest.approx([10, 0, 4])
    # A stream of two flows on link 0 takes twice what it has a flow.
    twice = Usage(used.streams, used.links, np.array([2.0, 1.0, 1.0, 1.0]))
    assert fair_rates(twice, np.array([0, 0, 0]), bandwidths) == pytest.approx([4, 2, 2])
    assert fair_rates(twice.of(np.array([True, False, True])), np.array([0, 0, 0]), bandwidths) == pytest.approx(
        [5, 0, 4]
    )


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 30), st.integers(2, 8), st.integers(1, 3), st.integers(0, 10**6))
def test_rates_are_max_min_fair_within_strict_levels(streams: int, size: int, levels: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    bandwidths = random.uniform(1, 10, size)
    on = random.uniform(0.5, 2, (size, streams)) * (random.random((size, streams)) < 0.4)
    on[random.integers(size, size=streams), np.arange(streams)] = 1  # each uses one link at least
    stream, link = np.nonzero(on.T)
    level = random.integers(levels, size=streams)
    rates = fair_rates(Usage(stream, link, on.T[stream, link]), level, bandwidths)
    assert np.all(on @ rates <= bandwidths * (1 + 1e-6))
    # Each stream has a full link on which it is in the last level served, and none of its level is faster.
    for s in range(streams):
        assert any(
            on[e] @ np.where(level <= level[s], rates, 0) >= bandwidths[e] * (1 - 1e-6)
            and rates[s] >= max(rates[(on[e] > 0) & (level == level[s])]) - 1e-6
            for e in np.flatnonzero(on[:, s])
        )


def test_an_iteration_alone() -> None:
    outcome = simulate(WIRE, [Submission(job("j", 4, 8, 2, 3), 1.0, 5)], fixed({"j": 0}), 8, 100)
    assert outcome.jobs[0].completion_s == pytest.approx(25) and outcome.end_s == pytest.approx(26)
    assert outcome.computed_flop == pytest.approx(40)
    assert outcome.utilisation == pytest.approx(2 / 5)
    assert outcome.flow_events == 10 and outcome.decisions == 1
    assert outcome.largest_gap_share == pytest.approx(1)  # when it has computed and not yet sent


def test_overlap_hides_traffic() -> None:
    outcome = simulate(WIRE, [Submission(job("j", 4, 8, 2, 1, 0.5), 0.0, 5)], fixed({"j": 0}), 8, 100)
    assert outcome.end_s == pytest.approx(10) and outcome.utilisation == pytest.approx(1)


def test_first_example_of_the_paper() -> None:
    jobs = [job("1", 10, 10, 2, 2), job("2", 10, 5, 1, 1)]
    for levels, flop in (({"1": 0, "2": 1}, 12 * 0.375 * 10), ({"1": 1, "2": 0}, 50)):
        steady = run(jobs, levels, 36).computed_flop - run(jobs, levels, 24).computed_flop
        assert steady == pytest.approx(flop)


def test_arrivals_and_completions_decide_anew_and_reset_levels() -> None:
    seen = []

    def policy(snapshot: Snapshot) -> Decision:
        seen.append([j.name for j in snapshot.jobs])
        return crux(snapshot)

    submissions = [Submission(job("long", 1, 1, 1, 1), 0, 10), Submission(job("short", 1, 9, 1, 1), 2.5, 2)]
    outcome = simulate(WIRE, submissions, policy, 8, 1000)
    assert seen == [["long"], ["long", "short"], ["long"]]
    assert [j.iterations for j in outcome.jobs] == [10, 2]
    assert outcome.jobs[1].completion_s == pytest.approx(4)  # goes first, so it never waits


def test_alignment_delays_an_iteration() -> None:
    policy = fixed({"j": 0}, {"j": Alignment(4, 3)})
    assert simulate(WIRE, [Submission(job("j", 1, 1, 1, 1), 1, 1)], policy, 8, 100).end_s == pytest.approx(5)


def test_jobs_without_traffic_only_compute() -> None:
    quiet = Job("quiet", 2, 4, 2, (Flow("a", "a", 5),))
    outcome = simulate(WIRE, [Submission(quiet, 0, 3), Submission(job("j", 1, 1, 1, 1), 0, 2)], crux, 8, 100)
    assert outcome.jobs[0].left_s == pytest.approx(6) and outcome.jobs[1].left_s == pytest.approx(4)


@pytest.mark.parametrize("size_bytes", [0.0, 0.25, 1.0])
def test_an_iteration_that_ends_at_the_end_counts(size_bytes: float) -> None:
    flows = (Flow("a", "b", size_bytes),) if size_bytes else ()
    for iteration_s, end_s in ((1.0, 10), (0.1, 10), (0.3, 30), (1 / 3, 100)):
        made = Job("j", 1, 1, iteration_s, tuple(replace(f, size_bytes=f.size_bytes * iteration_s) for f in flows), 0.0)
        late = Submission(Job("late", 1, 1, 1), end_s)
        outcome = simulate(WIRE, [Submission(made), late], fixed({"j": 0}), 8, end_s)
        count = round(end_s / iteration_s)
        assert [each.iterations for each in outcome.jobs] == [count, 0] and outcome.decisions == 1
        assert outcome.computed_flop == pytest.approx(count)
        whole = simulate(WIRE, [Submission(made, 0, count)], fixed({"j": 0}), 8, end_s)
        assert whole.jobs[0].left_s == pytest.approx(end_s) and whole.jobs[0].iterations == count


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["aa", "ab", "ac", "cb"]), st.floats(0.1, 9)), max_size=5),
    st.floats(0.01, 100),
    st.floats(0, 1),
    st.booleans(),
)
def test_a_declared_time_is_what_an_iteration_alone_takes(
    flows: list[tuple[str, float]], declared_s: float, overlap_start: float, lockstep: bool
) -> None:
    """Shorter or longer than the modelled one, over links of 1 and 2 bytes/s and a fabric; without flows too."""
    cluster = one_way(("a", "b", 1.0), ("a", "c", 2.0), ("c", "b", 2.0), nodes=("a", "b", "c"))
    sent = tuple(Flow(ends[0], ends[1], size) for ends, size in flows)
    made = Job("j", 1, 1, 1, sent, overlap_start, declared_s, lockstep)
    outcome = simulate(cluster, [Submission(made, 0, 3)], fixed({"j": 0}), 8, 1e4)
    assert outcome.end_s == pytest.approx(3 * max(1, overlap_start + declared_s))


def test_a_declared_time_on_a_shared_link() -> None:
    """Of one byte, 5 s declared and 0.1 s modelled: the link has room for another job, whose iterations take 2 s."""
    declared = replace(job("slow", 1, 1, 1, 1), communication_s=5.0)
    outcome = simulate(
        wire(10.0), [Submission(declared), Submission(job("j", 1, 1, 1, 9.8))], fixed({"slow": 0, "j": 1}), 8, 60
    )
    assert [each.iterations for each in outcome.jobs] == [10, 30]


def test_errors() -> None:
    with pytest.raises(PlanningError, match="iterations is 0"):
        Submission(job("j", 1, 1, 1, 1), 0, 0)
    with pytest.raises(PlanningError, match="-1 s"):
        simulate(WIRE, [], crux, 8, -1)


def random_submissions(cluster: Cluster, random: np.random.Generator, count: int) -> list[Submission]:
    hosts = [node.name for node in cluster.nodes]
    result = []
    for i in range(count):
        chosen = random.choice(hosts, random.integers(2, 5), replace=False)
        size_bytes = random.uniform(1, 5)
        flows = tuple(Flow(str(a), str(b), size_bytes) for a, b in zip(chosen, np.roll(chosen, 1), strict=True))
        made = Job(f"j{i}", 8, random.uniform(1, 9), random.uniform(0.1, 2), flows, float(random.choice([0, 0.5, 1])))
        result.append(Submission(made, float(random.uniform(0, 20)), int(random.integers(1, 30))))
    return result


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 3))
def test_runs_keep_theorem_1_finish_their_work_and_repeat(seed: int, count: int, levels: int) -> None:
    random = np.random.default_rng(seed)
    cluster = clos(2, 3, 2, 4, 3)
    submissions = random_submissions(cluster, random, count)
    outcome = simulate(cluster, submissions, crux, levels, 1e6, seed)
    assert 0 < outcome.largest_gap_share <= 1 + 1e-6
    assert [j.iterations for j in outcome.jobs] == [s.iterations for s in submissions]
    assert outcome.computed_flop == pytest.approx(
        sum(s.iterations * s.job.compute_flop for s in submissions if s.iterations)
    )
    assert outcome.flow_events == sum(2 * len(s.job.flows) * s.iterations for s in submissions if s.iterations)
    assert outcome == simulate(cluster, submissions, crux, levels, 1e6, seed)


def test_flows_in_lockstep_go_with_the_slowest() -> None:
    """One flow over the full link, one over a free one: on its own it ends early, and makes room there."""
    cluster = one_way(("a", "b", 1.0), ("c", "d", 1.0), nodes=("a", "b", "c", "d"))
    flows = (Flow("a", "b", 4), Flow("c", "d", 2))
    other = Job("other", 1, 1, 1e-6, (Flow("c", "d", 4),))
    ends = []
    for lockstep in (False, True):
        big = Job("big", 1, 1, 1, flows, lockstep=lockstep)
        levels = fixed({"big": 0, "other": 1})
        outcome = simulate(cluster, [Submission(big, 0, 1), Submission(other, 1, 1)], levels, 8, 100)
        assert outcome.jobs[0].left_s == pytest.approx(5)
        ends.append(outcome.jobs[1].left_s)
    assert ends == pytest.approx([1 + 2 + 4, 1 + 4 + 2])  # in lockstep half of the link is free for four seconds


def test_a_nodes_fabric_is_the_jobs_own() -> None:
    cluster = one_way(("a", "b", 1.0), nodes=("a", "b"))
    inside = Job("inside", 8, 1, 1, (Flow("a", "a", 2e9), Flow("a", "a", 1e9)))
    outcome = simulate(cluster, [Submission(inside, 0, 2), Submission(replace(inside, name="too"), 0, 2)], crux, 8, 100)
    assert [job.left_s for job in outcome.jobs] == pytest.approx([8, 8])  # 1 s, and 3e9 bytes at 1e9 a second, twice
    assert outcome.flow_events == 16


def test_a_lease_ends_within_an_iteration() -> None:
    submissions = [Submission(job("j", 4, 8, 2, 3), 1.0, leaves_s=8.5), Submission(job("k", 1, 1, 1, 1), 0.0, 20)]
    outcome = simulate(WIRE, submissions, fixed({"j": 0, "k": 1}), 8, 100)
    assert outcome.jobs[0].left_s == pytest.approx(8.5) and outcome.jobs[0].iterations == 1
    assert outcome.jobs[1].iterations == 20
    assert outcome.computed_flop == pytest.approx(8 * 2 + 20)
    with pytest.raises(PlanningError, match="leaves at 1"):
        Submission(job("j", 4, 8, 2, 3), 2.0, leaves_s=1.0)
