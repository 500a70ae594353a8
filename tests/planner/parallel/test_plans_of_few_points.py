"""Searches from few profiles, under any settings, in little time: what they find, prove, and say."""

import dataclasses
import random
import time
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from random_plans import MIB
from typer.testing import CliRunner

from triton_ext.cli import app
from triton_ext.errors import PlanningError
from triton_ext.planner import presets
from triton_ext.planner.cluster import DeviceType, Fabric, Node, star
from triton_ext.planner.parallel import gantt, metis, plan_file, planning, profile_files, report, uniform
from triton_ext.planner.parallel import search as searching
from triton_ext.planner.parallel.planning import Options
from triton_ext.planner.parallel.profiles import Model, Point, Profiles
from triton_ext.planner.parallel.result import Cost, SearchResult
from triton_ext.planner.parallel.search import SearchSettings, search

PROFILES = Path(__file__).parents[3] / "examples" / "planner" / "profiles"
EXAMPLE = profile_files.read(PROFILES)[0]


def points(*keys):
    """Of the example: as if only these had been measured."""
    chosen = {key: dataclasses.replace(EXAMPLE.points[key], source="measured") for key in keys}
    return Profiles(EXAMPLE.model, chosen)


def invoke(*arguments):
    result = CliRunner().invoke(app, ["plan", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def random_case(seed):
    """A few devices of up to three types on unlike nodes, and profiles of some micro-batch sizes only."""
    rng = random.Random(seed)
    kinds = [DeviceType(f"t{i}", rng.randint(500, 6000) * MIB, 1e14, 1e12) for i in range(rng.randint(1, 3))]
    nodes, left = [], rng.randint(2, 5)
    while left:
        count = rng.randint(1, left)
        types = tuple(rng.choice(kinds).name for _ in range(count))
        nodes.append(Node(f"n{len(nodes)}", types, Fabric(10 ** rng.uniform(10, 11), 3e-6)))
        left -= count
    widths = {node.name: 10 ** rng.uniform(8.5, 10.5) for node in nodes}
    layers, batch = 4, rng.choice([4, 6, 8])
    parameters = tuple(int(rng.uniform(5, 60) * MIB) for _ in range(layers))
    model = Model("random", parameters, (int(rng.uniform(0.5, 8) * MIB),) * layers)
    made = {}
    for kind in kinds:
        speed = rng.uniform(0.2, 1)
        for tp in rng.choice([(1,), (1, 2), (1, 4)]):
            for samples in rng.sample([1, 2, 3, 4, 8], rng.randint(1, 3)):
                times = tuple(rng.uniform(0.5, 2) * 10 * (samples + 0.5) / speed / tp**0.8 for _ in parameters)
                kept = tuple(int(30 * MIB * samples / tp) for _ in parameters)
                need = tuple(4 * size // tp + some for size, some in zip(parameters, kept, strict=True))
                made[kind.name, tp, samples] = Point(times, need, sum(times), 3.0, activation_memory_bytes=kept)
    return star(kinds, nodes, widths, 10e-6), Profiles(model, made), batch


@pytest.mark.parametrize(
    ("devices", "batch", "sizes"), [(1, 4, (4,)), (1, 8, (4,)), (2, 4, (2, 4, 8)), (2, 8, (4,)), (3, 12, (4, 8))]
)
def test_a_measured_point_suffices(devices, batch, sizes):
    cluster = presets.cluster({"A100-40": devices})
    roomy = dataclasses.replace(cluster.device_types[0], memory_bytes=1 << 37)
    cluster = dataclasses.replace(cluster, device_types=(roomy,))
    found = search(points(*(("A100-40", 1, size) for size in sizes)), cluster, batch)
    assert found.proven and not found.best.modelled
    shares = {replica.samples for stage in found.best.plan.stages for replica in stage.replicas}
    assert min(shares) >= min(sizes) and max(shares) <= max(sizes)


def test_types_whose_profiles_begin_at_different_sizes_share_a_micro_batch():
    """A replica of each type: 4 samples are the least for one of them, 1 for the other."""
    some = points(("A100-40", 1, 4), ("A100-40", 1, 8), ("V100-16", 1, 1), ("V100-16", 1, 2))
    cluster = presets.cluster({"A100-40": 1, "V100-16": 1})
    found = search(some, cluster, 5)
    assert found.best is None  # 5 samples: one stage, 4 and 1, which needs too much memory on a V100
    roomy = tuple(dataclasses.replace(kind, memory_bytes=1 << 40) for kind in cluster.device_types)
    found = search(some, dataclasses.replace(cluster, device_types=roomy), 5)
    assert [replica.samples for stage in found.best.plan.stages for replica in stage.replicas] == [4, 1]


def test_modelled_points_are_the_same_for_search_and_baselines():
    cluster, some = presets.cluster({"A100-40": 2}), points(("A100-40", 1, 1))
    options = Options(model_missing=True)
    found = planning.search(some, cluster, 16, options)
    evaluator = planning.evaluator(some, options)
    best = uniform.best_uniform(some, cluster, 16, evaluator)
    assert found.proven and found.best.cost.total_ms <= best.cost.total_ms * (1 + 1e-9)
    assert best.plan.microbatch_samples > 1  # which nobody measured
    again = evaluator.cost(found.best.plan, cluster)
    assert again.cost.total_ms == pytest.approx(found.best.cost.total_ms) and again.modelled == found.best.modelled


@settings(max_examples=40, deadline=None)
@example(833, "metis", set(), True)  # the best uniform plan has devices of one type before and behind another's
@given(
    st.integers(0, 10**6),
    st.sampled_from(["1f1b", "gpipe", "interleaved", "metis", "metis unused"]),
    st.sets(st.sampled_from(sorted(planning.ALLOWED)), max_size=2),
    st.booleans(),
)
def test_no_baseline_is_better_than_a_proven_optimum(seed, kind, allowed, modelled):
    cluster, profiles, batch = random_case(seed)
    if kind.startswith("metis"):
        options = Options(cost="metis", allow_unused="unused" in kind, model_missing=modelled)
    else:
        chunks = 2 if kind == "interleaved" else 1
        options = Options(schedule=kind, chunks=chunks, allowed=tuple(allowed), model_missing=modelled)
    found = planning.search(profiles, cluster, batch, options)
    evaluator = planning.evaluator(profiles, options)
    for best in (uniform.best_uniform, uniform.best_as_if_slowest):
        other = best(profiles, cluster, batch, evaluator)
        if other is not None:
            assert other.plan.schedule == options.schedule
            assert found.best is not None and found.best.cost.total_ms <= other.cost.total_ms * (1 + 1e-9)


def shuffled(cluster, rng):
    nodes, links = list(cluster.nodes), list(cluster.links)
    rng.shuffle(nodes)
    rng.shuffle(links)
    return dataclasses.replace(cluster, nodes=tuple(nodes), links=tuple(links))


def test_nodes_in_another_order_give_the_same_optimum():
    cluster = presets.cluster({"A100-40": 3, "V100-16": 5})
    reverse = dataclasses.replace(cluster, nodes=tuple(reversed(cluster.nodes)))
    some = points(*((kind, tp, n) for kind in ("A100-40", "V100-16") for tp in (1, 2) for n in (1, 2, 4)))
    first, other = (search(some, each, 16) for each in (cluster, reverse))
    assert first.proven and other.proven
    assert other.best.cost.total_ms == pytest.approx(first.best.cost.total_ms, rel=1e-12)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(["ours", "metis"]))
def test_no_order_of_nodes_or_links_changes_the_optimum(seed, cost):
    cluster, profiles, batch = random_case(seed)
    found = [
        search(profiles, each, batch, SearchSettings(cost=cost))
        for each in (cluster, *(shuffled(cluster, random.Random(number)) for number in range(2)))
    ]
    costs = [each.best.cost.total_ms if each.best else None for each in found]
    assert costs[0] is None or costs == pytest.approx([costs[0]] * 3, rel=1e-9)
    assert costs[0] is not None or costs == [None] * 3


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_only_time_is_called_time(schedule):
    options = Options(schedule=schedule, chunks=2 if schedule == "interleaved" else 1)
    found = planning.search(EXAMPLE, presets.cluster({"T4": 1}), 4, options)
    assert found.best is None and found.complete and not found.timed_out
    assert "every plan of the space was rejected" in report.outcome(found)
    assert report.hints(found, False, ()) == [
        "hint: profile what is missing, or take it from a roofline with --modelled"
    ]
    metis_found = metis.search(EXAMPLE, presets.cluster({"A100-40": 8}), 64, metis.MetisSettings(time_limit_s=1e-9))
    assert metis_found.timed_out and not metis_found.complete


def test_a_tiny_limit_gives_a_plan_and_is_kept(monkeypatch):
    """With 16 settings, 224 choices: no more than a round is begun after the time is over."""
    prepared = []
    before = searching.OurProblem.prepare
    monkeypatch.setattr(searching.OurProblem, "prepare", lambda self, c: prepared.append(c) or before(self, c))
    cluster = presets.cluster({"A100-40": 8, "V100-16": 8})
    found = planning.search(EXAMPLE, cluster, 64, Options(allowed=tuple(planning.ALLOWED), time_limit_s=1e-6))
    assert found.best is not None and found.timed_out and not found.complete
    assert len(prepared) <= 4 and found.gap > 0
    assert "stopped at the time limit" in report.outcome(found)


def test_a_tiny_limit_gives_a_plan_where_no_uniform_one_can_be():
    """The slow devices have no room for an even share of the layers."""
    cluster = presets.cluster({"A100-40": 3, "V100-16": 2})
    small = [dataclasses.replace(k, memory_bytes=2 << 30) if k.name == "V100-16" else k for k in cluster.device_types]
    cluster = dataclasses.replace(cluster, device_types=tuple(small))
    evaluator = planning.evaluator(EXAMPLE, Options())
    assert uniform.best_uniform(EXAMPLE, cluster, 8, evaluator) is None
    assert planning.search(EXAMPLE, cluster, 8, Options(time_limit_s=1e-6)).best is not None


def test_many_types_have_a_plan_in_time():
    """720 orders of six types: the time is looked at between rounds of 16 choices."""
    names = ["A100-40", "A100-80", "H100-80", "RTX-3090", "T4", "V100-16"]
    model, any_point = EXAMPLE.model, EXAMPLE.points["A100-40", 1, 1]
    some = Profiles(model, {(name, 1, 1): any_point for name in names})
    roomy = presets.cluster(dict.fromkeys(names, 2))
    kinds = tuple(dataclasses.replace(kind, memory_bytes=1 << 40) for kind in roomy.device_types)
    cluster, given, told = dataclasses.replace(roomy, device_types=kinds), SearchSettings(time_limit_s=0.5), []
    began = time.monotonic()
    found = search(some, cluster, 12, given, lambda each: told.append((each.step, time.monotonic() - began)))
    assert found.best is not None and (found.proven or found.timed_out)
    assert sum(after_s > 0.5 for step, after_s in told if step == "bound") <= 1


def test_with_many_choices_a_short_search_is_no_worse_than_equal_planning():
    """What it has before any choice is bounded."""
    cluster = presets.cluster({"A100-40": 8, "V100-16": 8})
    given = SearchSettings(time_limit_s=60, plan_settings=Options(allowed=tuple(planning.ALLOWED)).plan_settings())
    running = searching._Search(EXAMPLE, cluster, 64, given, lambda _: None)
    running._first_uniform(many=True)
    best = uniform.best_uniform(EXAMPLE, cluster, 64, planning.evaluator(EXAMPLE, Options()))
    assert running._best_s * 1e3 <= best.cost.total_ms * (1 + 1e-9)


def test_a_search_that_ended_early_takes_a_better_baseline():
    cluster = presets.cluster({"A100-40": 8})
    best = search(EXAMPLE, cluster, 16).best
    worse = dataclasses.replace(best, plan=dataclasses.replace(best.plan, schedule="gpipe"), cost=Cost(1e6))
    late = SearchResult("ours", (worse,), 1, complete=False, timed_out=True)
    assert planning.including(late, (None, best), 5).plans == (best, worse)
    assert planning.including(late, (best,), 1).plans == (best,)
    for result in (dataclasses.replace(late, timed_out=False), dataclasses.replace(late, algorithm="metis")):
        assert planning.including(result, (best,), 5) is result


def test_a_step_without_time_has_no_rates():
    """A library's profiles may say so; the tables then leave shares out, and there is no picture."""
    some = points(("A100-40", 1, 1))
    free = {key: dataclasses.replace(p, layer_ms=(0.0,) * len(p.layer_ms), forward_backward_ms=0.0, optimizer_ms=0.0)
            for key, p in some.points.items()}  # fmt: skip
    cluster = presets.cluster({"A100-40": 1})
    best = search(Profiles(some.model, free), cluster, 2).best
    shown = planning.simulated(best, cluster, Profiles(some.model, free))
    assert shown.simulated_ms == 0
    assert report.plans([shown], cluster).row_count == report.stages(shown, cluster).row_count == 1
    with pytest.raises(PlanningError, match="takes no time"):
        gantt.draw(shown.plan, shown.step, cluster, Path("unused.png"))


def test_metis_limits_its_stages_where_our_search_does():
    cluster, some = presets.cluster({"A100-40": 4}), points(("A100-40", 1, 1), ("A100-40", 1, 4))
    found = search(some, cluster, 8, SearchSettings(cost="metis", max_stages=1))
    assert all(len(plan.plan.stages) == 1 for plan in found.plans)


def test_memory_is_compared_device_by_device():
    """A mixed stage, whose larger device needs more than the smaller one has, and the reverse."""
    kinds = [DeviceType("big", 2000 * MIB, 1e14, 1e12), DeviceType("little", 100 * MIB, 1e14, 1e12)]
    cluster = star(
        kinds, [Node("a", ("big",), Fabric(1e11, 0.0)), Node("b", ("little",), Fabric(1e11, 0.0))], 1e10, 0.0
    )
    model = Model("one", (MIB,), (MIB,))

    def profiles(big, little):
        return Profiles(
            model,
            {
                (name, 1, samples): Point((1.0 * samples,), (need * MIB,), 1.0 * samples, 0.0)
                for name, need in (("big", big), ("little", little))
                for samples in (1, 2)
            },
        )

    for big, little, fits in ((1500, 50, True), (50, 50, True), (150, 150, False), (2500, 50, False)):
        options = Options(cost="metis")
        found = planning.search(profiles(big, little), cluster, 2, options)
        assert (found.best is not None) == fits
        plans = list(uniform.uniform_plans(cluster, 1, 2))
        (both,) = [plan for plan in plans if plan.stages[0].dp == 2]
        for cost in planning.METHODS:
            evaluator = planning.evaluator(profiles(big, little), Options(cost=cost))
            if fits:
                assert evaluator.cost(both, cluster).cost.total_ms > 0
            else:
                with pytest.raises(PlanningError, match="GiB on device"):
                    evaluator.cost(both, cluster)


def test_forward_and_backward_that_take_less_than_their_layers_cost_nothing_more():
    point = dataclasses.replace(EXAMPLE.points["A100-40", 1, 1], forward_backward_ms=0.0)
    some = Profiles(EXAMPLE.model, {("A100-40", 1, 1): point})
    found = metis.search(some, presets.cluster({"A100-40": 2}), 4)
    assert found.best.cost.synchronization_ms == 0 and found.best.cost.total_ms > 0


def test_a_found_plan_is_kept_where_nothing_had_to_be_modelled():
    """A model of one layer has no roofline, and the example's points say that they are modelled."""
    model = Model("one", EXAMPLE.model.parameter_bytes[:1], EXAMPLE.model.activation_bytes[:1])
    one = {
        key: Point((point.layer_ms[0] + 1,), point.memory_bytes[:1], point.layer_ms[0] + 1, 1.0, source="modelled")
        for key, point in EXAMPLE.points.items()
    }
    cluster = presets.cluster({"A100-40": 2})
    found = planning.search(Profiles(model, one), cluster, 8, Options())
    simulated = planning.simulated(found.best, cluster, Profiles(model, one), model_missing=False)
    assert found.proven and simulated.simulated_ms > 0
    with pytest.raises(PlanningError, match="1 layers"):
        planning.search(Profiles(model, {("A100-40", 1, 1): one["A100-40", 1, 1]}), cluster, 8,
                        Options(model_missing=True))  # fmt: skip


def test_a_layer_without_parameters_can_be_modelled():
    parameters = list(EXAMPLE.model.parameter_bytes)
    parameters[1] = 0
    model = dataclasses.replace(EXAMPLE.model, parameter_bytes=tuple(parameters))
    some = Profiles(model, {("A100-40", 1, 1): EXAMPLE.points["A100-40", 1, 1]})
    cluster = presets.cluster({"V100-16": 2})
    assert planning.search(some, cluster, 4, Options(model_missing=True)).best is not None
    nothing = dataclasses.replace(model, parameter_bytes=(0,) * model.layers)
    with pytest.raises(PlanningError, match="no layer between its first and its last has parameters"):
        planning.search(Profiles(nothing, some.points), cluster, 4, Options(model_missing=True))


def test_processes_are_not_silently_ignored():
    with pytest.raises(PlanningError, match="one process, not in 2"):
        Options("metis", "metis", processes=2)


def test_the_command_compares_with_the_same_schedule(tmp_path):
    arguments = ("--cluster", "A100-40=2", "--batch", 8, "--schedule", "gpipe", "--allow", "recompute")
    code, output = invoke(PROFILES, *arguments, "-o", tmp_path / "plan.json")
    assert code == 0, output
    plan = plan_file.load(tmp_path / "plan.json")
    assert plan.plan.schedule == "gpipe"
    lines = [line for line in output.splitlines() if "best uniform plan" in line]
    assert float(lines[0].split("│")[-2]) >= 1


def test_time_is_looked_at_within_a_step():
    started = time.monotonic()
    search(EXAMPLE, presets.cluster({"A100-40": 8}), 16, SearchSettings(time_limit_s=0.05))
    assert time.monotonic() - started < 5
