"""Decisions: what is possible and why not, measured points, hysteresis, and the golden table."""

from dataclasses import replace
from pathlib import Path

import pytest
import schedule_golden
from clusters_for_schedules import clusters, one_node, requests, several
from hypothesis import given, settings
from hypothesis import strategies as st

from triton_ext.errors import PlanningError
from triton_ext.planner import presets
from triton_ext.planner.schedules import SCHEDULES, Choice, Costs, Measurement, Request, choose
from triton_ext.planner.schedules.measured import interpolate
from triton_ext.planner.schedules.topology import topology_of

REQUEST = Request("all_reduce", 1 << 20, "float32", 256, 0.0, tuple(range(8)), slices=(1,))


def codes(decision):
    return {name: reason.code for name, reason in decision.rejected}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_schedule_is_a_candidate_or_has_a_reason(data):
    cluster = data.draw(clusters())
    executable = data.draw(st.sets(st.sampled_from(SCHEDULES))) | {"one_shot"}
    decision = choose(data.draw(requests(cluster, executable=frozenset(executable))), cluster)
    possible = {candidate.choice.schedule for candidate in decision.candidates}
    named = {name.split(",")[0] for name, reason in decision.rejected if reason.code != "too_few_tiles"}
    assert possible | named == set(SCHEDULES) and not possible & named
    assert possible <= executable
    assert all(reason.code and reason.text for _, reason in decision.rejected)
    assert decision.chosen.total_s == pytest.approx(min(c.total_s for c in decision.candidates), rel=1e-5)
    assert decision.chosen in decision.candidates
    if decision.choice.schedule == "unfused":
        assert decision.schedule is None
    else:
        assert decision.schedule.name == decision.choice.schedule and decision.schedule.world == len(cluster.devices)


def test_what_the_runtime_cannot_run_is_listed():
    decision = choose(replace(REQUEST, executable=frozenset({"one_shot", "two_shot"})), one_node(8))
    assert decision.choice.schedule == "two_shot"
    assert codes(decision) == dict.fromkeys(("ring", "halving_doubling", "tree", "hierarchical", "unfused"),
                                            "not_executable")  # fmt: skip
    assert "- ring: not executable by the runtime [not_executable]" in str(decision)
    assert "* two_shot, 1 slice" in str(decision)


def test_what_the_caller_does_not_want_is_listed_with_its_reason():
    barred = (("two_shot", "two waits"), ("unfused", "not asked for"))
    decision = choose(replace(REQUEST, barred=barred), one_node(8))
    assert decision.choice.schedule == "halving_doubling"
    assert codes(decision)["two_shot"] == codes(decision)["unfused"] == "barred"
    assert "- two_shot: two waits [barred]" in str(decision)
    with pytest.raises(PlanningError, match="barred: no 'rings'"):
        replace(REQUEST, barred=(("rings", ""),))


def test_reasons():
    assert codes(choose(REQUEST, one_node(8)))["hierarchical"] == "one_node"
    assert codes(choose(REQUEST, several([1] * 8)))["hierarchical"] == "one_rank_per_node"
    gather = choose(replace(REQUEST, collective="all_gather", tiles=4, slices=(1, 8)), several([4, 4]))
    assert codes(gather)["two_shot"] == "same_as" and codes(gather)["tree"] == "not_defined"
    assert codes(gather)["one_shot, 8 slices"] == "too_few_tiles"
    with pytest.raises(PlanningError, match=r"no schedule of all_to_all on 8 ranks is possible: .*ring is not a sched"):
        choose(replace(REQUEST, collective="all_to_all", executable=frozenset({"ring"})), one_node(8))


def test_one_rank_and_no_bytes():
    alone = replace(REQUEST, group=(5,), tile_compute_s=1e-6)
    assert choose(alone, one_node(8)).chosen.exposed_s == 0
    assert choose(replace(REQUEST, tensor_bytes=0), one_node(8)).chosen.total_s == pytest.approx(2e-6)


def test_switches_are_no_devices():
    """Two nodes of 8 and a switch are 16 ranks, not 17."""
    cluster = several([8, 8])
    decision = choose(replace(REQUEST, group=tuple(range(16)), executable=frozenset({"ring"})), cluster)
    assert decision.chosen.steps == 30
    with pytest.raises(PlanningError, match="0 to 15"):
        choose(replace(REQUEST, group=tuple(range(17))), cluster)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"collective": "alltoall"}, "no 'alltoall'; there are all_to_all, "),
        ({"dtype": "fp32"}, "no 'fp32'; there are"),
        ({"tensor_bytes": 6}, "tensor_bytes is 6; give whole elements of float32"),
        ({"tensor_bytes": -4}, "tensor_bytes is -4"),
        ({"tiles": 0}, "tiles is 0"),
        ({"tile_compute_s": -1.0}, "tile_compute_s is -1"),
        ({"tile_compute_s": float("nan")}, "tile_compute_s is nan"),
        ({"unfused_compute_s": float("inf")}, "unfused_compute_s is inf"),
        ({"executable": frozenset({"rings"})}, "no 'rings'"),
        ({"orders": ("random",)}, "no 'random'"),
        ({"slices": (0,)}, "at least one"),
        ({"group": ()}, "at least one"),
        ({"root": 8}, "root is 8"),
        ({"destinations": (1,)}, "1 destinations for a all_reduce of 8 ranks"),
        ({"collective": "put", "destinations": (1, 1, *[None] * 6)}, "at most once"),
        ({"collective": "put", "destinations": (8, *[None] * 7)}, "at most once"),
    ],
)
def test_requests_that_cannot_be(change, message):
    with pytest.raises(PlanningError, match=message):
        replace(REQUEST, **change)


def test_costs_and_groups_that_cannot_be():
    with pytest.raises(PlanningError, match="flag_s is -1"):
        Costs(flag_s=-1)
    with pytest.raises(PlanningError, match="sum_bytes_per_s is 0"):
        Costs(sum_bytes_per_s=0)
    for group in ((0, 0), (7, 8)):
        with pytest.raises(PlanningError, match="distinct indices of the cluster's devices, 0 to 7"):
            choose(replace(REQUEST, group=group), one_node(8))
    with pytest.raises(PlanningError, match="hysteresis is 1"):
        choose(REQUEST, one_node(8), hysteresis=1)


def measure(schedule, tensor_bytes, standalone_s, **options):
    return Measurement("all_reduce", schedule, 8, tensor_bytes, standalone_s, **options)


def alone(decision, name):
    (found,) = [c for c in decision.candidates if c.choice.schedule == name]
    return found.standalone_s, found.basis


def test_measured_points_count_inside_their_range_only():
    points = (measure("ring", 1 << 22, 400e-6), measure("ring", 1 << 18, 100e-6), measure("ring", 1 << 10, 50e-6))
    others = (
        Measurement("all_gather", "ring", 8, 1 << 20, 1e-6),
        Measurement("all_reduce", "ring", 4, 1 << 20, 1e-6),
        measure("ring", 1 << 20, 1e-6, slices=2),
    )
    decision = choose(REQUEST, one_node(8), measured=points + others)
    assert alone(decision, "ring") == (pytest.approx(200e-6), "measured (3 measured, 1024 to 4194304 B)")
    assert alone(decision, "two_shot")[1] == "model"
    assert choose(REQUEST, one_node(8), measured=points[::-1]).candidates == decision.candidates
    exactly = choose(replace(REQUEST, tensor_bytes=1 << 18), one_node(8), measured=points)
    assert alone(exactly, "ring")[0] == pytest.approx(100e-6)
    for nbytes in (1 << 9, 1 << 30):
        outside = replace(REQUEST, tensor_bytes=nbytes)
        found = alone(choose(outside, one_node(8), measured=points), "ring")
        assert found == (
            alone(choose(outside, one_node(8)), "ring")[0],
            "model (3 measured, 1024 to 4194304 B: outside)",
        )


def test_one_measured_point_is_a_range_of_one():
    points = (measure("ring", 1 << 20, 1e-6),)
    assert choose(REQUEST, one_node(8), measured=points).choice.schedule == "ring"
    near = choose(replace(REQUEST, tensor_bytes=(1 << 20) + 4), one_node(8), measured=points)
    assert near.choice.schedule == "two_shot" and "outside" in alone(near, "ring")[1]


def test_measured_points_that_cannot_be():
    with pytest.raises(PlanningError, match="positive bytes and seconds"):
        choose(REQUEST, one_node(8), measured=(measure("ring", 1 << 20, 0.0),))
    with pytest.raises(PlanningError, match="give one of the two"):
        choose(REQUEST, one_node(8), measured=(measure("ring", 8, 1.0), measure("ring", 8, 2.0)))


def test_measured_communication_hides_behind_computation():
    """Twice the measured time: what the computation hides stays hidden."""
    request = replace(REQUEST, collective="all_to_all", tile_compute_s=1e-7, slices=(8,))
    request = replace(request, executable=frozenset({"one_shot"}))
    model = choose(request, one_node(8)).chosen
    point = Measurement("all_to_all", "one_shot", 8, 1 << 20, 2 * model.standalone_s)
    measured = choose(request, one_node(8), measured=(point,)).chosen
    assert measured.standalone_s == pytest.approx(2 * model.standalone_s)
    assert model.total_s < measured.total_s < request.compute_s + measured.standalone_s - 10e-6


def test_hysteresis():
    ring, two_shot = (Choice(name, 1, "remote_first") for name in ("ring", "two_shot"))
    assert choose(REQUEST, one_node(8)).choice == two_shot

    def with_ring(times_of_two_shot, **options):
        seconds = alone(choose(REQUEST, one_node(8)), "two_shot")[0] * times_of_two_shot
        points = (measure("ring", REQUEST.tensor_bytes, seconds),)
        return choose(REQUEST, one_node(8), measured=points, previous=ring, **options)

    assert with_ring(1.04).choice == ring and "as before" in with_ring(1.04).why
    assert with_ring(1.10).choice == two_shot and "saves 9.1%" in with_ring(1.10).why
    assert with_ring(1.10, hysteresis=0.2).choice == ring
    assert with_ring(1.04, hysteresis=0.0).choice == two_shot
    gone = choose(REQUEST, one_node(8), previous=Choice("hierarchical", 1, "remote_first"))
    assert gone.choice == two_shot and "is not possible" in gone.why


def test_ties_send_fewer_bytes():
    """Behind a long computation all that shows is the last slice: next to nothing. Then the fewest bytes win."""
    request = replace(REQUEST, tile_compute_s=1.0, executable=frozenset({"one_shot", "two_shot"}), slices=(16,))
    decision = choose(request, one_node(8))
    assert decision.choice.schedule == "two_shot" and "sends least" in decision.why
    assert decision.chosen.sent_bytes == 2 * 7 * REQUEST.tensor_bytes
    assert choose(replace(request, tensor_bytes=4), one_node(8)).choice.schedule == "one_shot"


def test_unfused_where_it_wins():
    costs = Costs(put_s=100e-6)
    request = replace(REQUEST, costs=costs, tile_compute_s=1e-6, slices=(1, 8))
    assert choose(request, one_node(8)).choice.schedule == "unfused"
    forbidden = replace(request, executable=request.executable - {"unfused"})
    assert choose(forbidden, one_node(8)).choice.schedule == "halving_doubling", "the fewest messages"
    slow = replace(request, unfused_compute_s=1e-3)
    assert choose(slow, one_node(8)).choice.schedule != "unfused"


def test_same_question_same_answer():
    cluster = presets.cluster({"A100-40": 6, "V100-16": 3})
    request = replace(REQUEST, group=tuple(range(9)))
    decision = choose(request, cluster)
    assert choose(replace(request), cluster) is decision, "kept"
    again = presets.cluster({"A100-40": 6, "V100-16": 3})
    assert choose(request, again) == decision


@pytest.mark.parametrize("nbytes", [1 << 40, 4])
def test_no_size_is_too_large_or_too_small(nbytes):
    for sizes in ([8], [1] * 8, [5, 2, 1]):
        decision = choose(replace(REQUEST, tensor_bytes=nbytes), several(sizes))
        assert 0 < decision.chosen.total_s < 1e4


def test_the_golden_table():
    path = Path(__file__).with_name("golden.md")
    assert schedule_golden.table() == path.read_text(), (
        "decisions differ from golden.md; if that is meant, write it again and look at the difference: "
        "PYTHONPATH=. python tests/planner/schedules/schedule_golden.py"
    )


@given(st.permutations([(None, 3e-3), (1, 1e-3), (4, 2e-3), (1, 1e-3)]))
def test_a_point_for_these_slices_counts_before_one_for_any(points):
    measured = [Measurement("all_reduce", "ring", 8, 1 << 20, seconds, slices) for slices, seconds in points]
    basis = "measured (1 measured, 1048576 to 1048576 B)"
    for slices, seconds in ((1, 1e-3), (4, 2e-3), (2, 3e-3)):
        assert interpolate(measured, REQUEST, "ring", slices) == (seconds, basis)
    for slices in (None, 4):
        with pytest.raises(PlanningError, match="measured before as"):
            interpolate([*measured, measured[0]._replace(slices=slices, standalone_s=1.0)], REQUEST, "ring", 4)


def test_topologies_of_the_groups_asked_for_last_are_kept():
    cluster = one_node(9)
    groups = [tuple(d for d in range(9) if number >> d & 1) for number in range(1, 400)]
    first = topology_of(cluster, groups[0])
    for group in groups:
        topology_of(cluster, group)
        assert topology_of(cluster, groups[0]) is first
