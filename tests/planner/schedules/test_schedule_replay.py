"""Every schedule, executed: the right result, nothing twice, nothing before it is there."""

from dataclasses import replace

import numpy as np
import pytest
from clusters_for_schedules import destinations, sizes
from hypothesis import given, settings
from hypothesis import strategies as st

from triton_ext.errors import PlanningError
from triton_ext.planner.schedules import Reason, Schedule
from triton_ext.planner.schedules.algorithms import NAMES, Pattern, build
from triton_ext.planner.schedules.replay import cut, replay
from triton_ext.planner.schedules.schedule import COLLECTIVES


def expected(schedule: Schedule, tensors: list[np.ndarray]) -> list[np.ndarray]:
    """Each rank's result, from the definition of the collective."""
    world = schedule.world
    parts = cut(len(tensors[0]), world)
    match schedule.collective:
        case "all_reduce":
            return [sum(tensors)] * world
        case "reduce_scatter":
            return [sum(tensors)[slice(*part)] for part in parts]
        case "all_gather":
            return [np.concatenate(tensors)] * world
        case "broadcast":
            return [tensors[schedule.root]] * world
        case "all_to_all":
            return [np.concatenate([tensor[slice(*part)] for tensor in tensors]) for part in parts]
    came_from = [schedule.destinations.index(rank) if rank in schedule.destinations else None for rank in range(world)]
    return [tensors[source] if source is not None else np.array([], np.int64) for source in came_from]


def tensors_of(world: int, elements: int) -> list[np.ndarray]:
    return [np.random.default_rng(rank).integers(-(1 << 40), 1 << 40, elements) for rank in range(world)]


def assert_right(schedule: Schedule, elements: int) -> None:
    tensors = tensors_of(schedule.world, elements)
    for pieces, wanted in zip(replay(schedule, tensors), expected(schedule, tensors), strict=True):
        np.testing.assert_array_equal(np.concatenate([*pieces.values(), np.array([], np.int64)]), wanted)


@st.composite
def patterns(draw: st.DrawFn) -> Pattern:
    nodes = tuple(node for node, size in enumerate(draw(sizes())) for _ in range(size))
    collective = draw(st.sampled_from(COLLECTIVES))
    return Pattern(
        collective,
        nodes,
        draw(st.integers(0, len(nodes) - 1)) if collective == "broadcast" else 0,
        destinations(draw, len(nodes)) if collective == "put" else (),
        draw(st.integers(1, 5)),
    )


@settings(max_examples=300)
@given(patterns(), st.sampled_from(NAMES), st.integers(0, 40), st.data())
def test_any_nodes_any_number_of_ranks(pattern, name, elements, data):
    schedule = build(name, pattern)
    if isinstance(schedule, Reason):
        assert schedule.code in ("not_defined", "same_as", "one_node", "one_rank_per_node") and schedule.text
        return
    assert_right(schedule, elements)
    ranks = tuple(data.draw(st.permutations(range(pattern.world))))
    assert_right(schedule.relabelled(ranks), elements)


@pytest.mark.parametrize("world", range(1, 10))
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_there_is_a_direct_schedule_for_every_world(collective, world):
    puts = tuple((rank + 1) % world for rank in range(world)) if collective == "put" else ()
    schedule = build("one_shot", Pattern(collective, (0,) * world, destinations=puts))
    assert_right(schedule, 5)
    assert len(schedule.steps) == (1 if world > 1 else 0)


def every_schedule() -> list[Schedule]:
    """On uneven nodes, five ranks."""
    found = []
    for collective in COLLECTIVES:
        puts = (1, 0, None, 4, 2) if collective == "put" else ()
        for name in NAMES:
            schedule = build(name, Pattern(collective, (0, 0, 0, 1, 1), destinations=puts, chunks=2))
            if isinstance(schedule, Schedule):
                found.append(schedule)
    return found


@pytest.mark.parametrize("schedule", every_schedule(), ids=lambda s: f"{s.name} {s.collective}")
def test_every_transfer_is_needed_once_and_in_its_place(schedule):
    """Left out, doubled, or once more at the end: each is found, for each transfer; so are steps in reverse."""
    tensors = tensors_of(schedule.world, 7)
    for number, step in enumerate(schedule.steps):
        for index, transfer in enumerate(step):
            without = (*step[:index], *step[index + 1 :])
            for changed in (without, (*step, transfer)):
                steps = (*schedule.steps[:number], changed, *schedule.steps[number + 1 :])
                with pytest.raises(PlanningError, match=r"lacks piece|twice|not there yet"):
                    replay(replace(schedule, steps=steps), tensors)
            again = (*schedule.steps, (transfer,))
            with pytest.raises(PlanningError, match="twice"):
                replay(replace(schedule, steps=again), tensors)
    if len(schedule.steps) > 1:
        with pytest.raises(PlanningError, match=r"not there yet|twice|lacks piece"):
            replay(replace(schedule, steps=schedule.steps[::-1]), tensors)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"destination": 5}, "not two ranks of 5"),
        ({"destination": 0}, "not two ranks of 5"),
        ({"pieces": (9,)}, "pieces are 0 to 4"),
        ({"pieces": ()}, "at least one"),
        ({"reduces": True}, "all_gather adds nothing"),
        ({"pieces": (3,)}, "piece 3 is not there yet"),
    ],
)
def test_transfers_that_make_no_sense(change, message):
    schedule = build("one_shot", Pattern("all_gather", (0,) * 5))
    transfer = schedule.steps[0][0]
    assert transfer.source == 0
    with pytest.raises(PlanningError, match=message):
        replay(replace(schedule, steps=((transfer._replace(**change),),)), tensors_of(5, 3))


def test_hierarchical_sends_once_between_nodes():
    """One node of three, one of two: what is for the other node crosses once, in one stream for each pair of nodes."""
    nodes = (0, 0, 0, 1, 1)
    schedule = build("hierarchical", Pattern("all_to_all", nodes))
    across = [t for step in schedule.steps for t in step if nodes[t.source] != nodes[t.destination]]
    assert len(across) == 2 and sum(len(t.pieces) for t in across) == 2 * 3 * 2
    gather = build("hierarchical", Pattern("all_gather", nodes))
    crossing = [p for step in gather.steps for t in step if nodes[t.source] != nodes[t.destination] for p in t.pieces]
    assert sorted(crossing) == [0, 1, 2, 3, 4]


def test_five_ranks_in_a_ring_take_eight_steps():
    assert len(build("ring", Pattern("all_reduce", (0,) * 5)).steps) == 8


@pytest.mark.parametrize(("world", "steps"), [(2, 1), (3, 2), (5, 3), (6, 3), (8, 3), (9, 4)])
def test_height_of_trees_of_any_number_of_ranks(world, steps):
    assert len(build("tree", Pattern("broadcast", (0,) * world)).steps) == steps
    assert len(build("tree", Pattern("all_reduce", tuple(range(world)), chunks=3)).steps) == 2 * (steps + 2)
