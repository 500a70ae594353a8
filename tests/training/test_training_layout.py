"""Who computes and sends what, without processes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triton_ext.errors import PlanningError
from triton_ext.planner.parallel.plan import ParallelPlan, Replica, Settings, Stage
from triton_ext.training import layout


def plan(*stages, microbatches=4, schedule="1f1b", **settings):
    """Stages as (layers, [(devices, samples), …])."""
    begin, made = 0, []
    for layers, replicas in stages:
        made.append(Stage(begin, begin + layers, tuple(Replica(tuple(d), s) for d, s in replicas)))
        begin += layers
    samples = sum(s for _, s in stages[0][1])
    return ParallelPlan(tuple(made), microbatches, microbatches * samples, schedule, Settings(**settings))


@st.composite
def two_stages(draw):
    samples, device, stages = draw(st.integers(1, 9)), 0, []
    for layers in (2, 3):
        dp, tp = draw(st.integers(1, 4)), draw(st.integers(1, 3))
        cuts = sorted(draw(st.lists(st.integers(0, samples), min_size=dp - 1, max_size=dp - 1)))
        shares = [b - a for a, b in zip([0, *cuts], [*cuts, samples], strict=True)]
        replicas = []
        for share in shares:
            replicas.append((range(device, device + tp), share))
            device += tp
        stages.append((layers, replicas))
    return plan(*stages)


@given(two_stages())
def test_every_device_gets_each_of_its_samples_once_and_they_are_the_right_ones(found):
    for source, destination in (found.stages, found.stages[::-1]):
        for device in destination.devices:
            index, _ = layout.place(destination, device)
            begin, end = layout.samples(destination, index)
            parts = sorted(layout.received(source, destination, device), key=lambda part: part.begin)
            covered = [sample for part in parts for sample in range(part.begin, part.end)]
            assert covered == list(range(end - begin))
            for part in parts:
                (sent,) = [s for s in layout.sent(source, destination, part.peer) if s.peer == device]
                origin, _ = layout.samples(source, layout.place(source, part.peer)[0])
                assert origin + sent.begin == begin + part.begin
                assert sent.end - sent.begin == part.end - part.begin


def test_chunks_of_an_interleaved_schedule_are_dealt_in_turns():
    found = layout.chunks(plan((5, [([0], 2)]), (4, [([1], 2)]), schedule="interleaved", chunks_per_stage=2))
    assert [(c.stage, c.begin, c.end) for c in found] == [(0, 0, 3), (1, 3, 5), (0, 5, 7), (1, 7, 9)]


def test_chunks_without_interleaving_are_the_stages():
    found = layout.chunks(plan((1, [([0], 2)]), (6, [([1], 2)])))
    assert [(c.stage, c.begin, c.end) for c in found] == [(0, 0, 1), (1, 1, 7)]


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (plan((2, [([0], 1)]), (2, [([1], 1)]), (2, [([2], 1)]), microbatches=2), "3 stages with 2 micro-batches"),
        (plan((2, [([0], 1)]), shard_optimizer=True), "shard_optimizer"),
        (plan((2, [([0], 1)]), sequence_parallel=True), "sequence_parallel"),
        (plan((2, [([0], 1)]), schedule="interleaved", chunks_per_stage=2), "at least 2 of both"),
        (plan((2, [([0], 1)]), chunks_per_stage=2), "interleaved"),
        (
            plan((1, [([0], 1)]), (2, [([1], 1)]), schedule="interleaved", chunks_per_stage=2),
            "stage 0 has 1 layers for 2 chunks",
        ),
        (
            plan((2, [([0], 1)]), (2, [([1], 1)]), microbatches=5, schedule="interleaved", chunks_per_stage=2),
            "5 micro-batches",
        ),
        (
            plan((2, [([0], 1), ([2], 0)]), (2, [([1], 1)]), schedule="interleaved", chunks_per_stage=2),
            "without samples",
        ),
    ],
)
def test_what_cannot_be_executed_is_named(refused, message):
    with pytest.raises(PlanningError, match=message):
        layout.check(refused)
