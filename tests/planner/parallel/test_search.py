"""Our search: equal to the oracle, within its bounds, and with the rules that every plan keeps."""

import functools
import math
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_plans import MIB, uniform, with_links

from triton_ext.errors import PlanningError
from triton_ext.planner.cluster import DeviceType, Fabric, Node, star
from triton_ext.planner.parallel import metis
from triton_ext.planner.parallel import search as searching
from triton_ext.planner.parallel.options import Choice
from triton_ext.planner.parallel.oracle import exhaustive, our_cost_ms, plans
from triton_ext.planner.parallel.pipeline import simulate
from triton_ext.planner.parallel.plan import Settings
from triton_ext.planner.parallel.problems import OurProblem, Space
from triton_ext.planner.parallel.profiles import Model, Point, Profiles
from triton_ext.planner.parallel.search import SearchSettings, search


def small_case(seed, devices=4, layers=5, batch=4, memory_mib=(600, 6000)):
    """Up to two device types, with tight or ample memory, slow or fast links, and a profile of every point."""
    rng = random.Random(seed)
    kinds = [DeviceType(f"t{i}", rng.randint(*memory_mib) * MIB, 1e14, 1e12) for i in range(rng.randint(1, 2))]
    nodes, left = [], rng.randint(2, devices)
    while left:
        count = rng.randint(1, left)
        nodes.append(Node(f"n{len(nodes)}", (rng.choice(kinds).name,) * count, Fabric(10 ** rng.uniform(10, 11), 3e-6)))
        left -= count
    cluster = star(kinds, nodes, 10 ** rng.uniform(8.5, 10.5), 10e-6)
    parameters = tuple(int(rng.uniform(5, 60) * MIB) for _ in range(layers))
    model = Model("small", parameters, (int(rng.uniform(0.5, 8) * MIB),) * layers)
    weights = [rng.uniform(0.5, 2) for _ in range(layers)]
    points = {}
    for kind in kinds:
        speed = rng.uniform(0.3, 1)
        for tp in (1, 2):
            for samples in range(1, batch + 1):
                times = tuple(w * 10 * (samples + 0.5) / speed / tp**0.8 for w in weights)
                kept = tuple(int(30 * MIB * samples / tp) for _ in weights)
                need = tuple(4 * p // tp + a for p, a in zip(parameters, kept, strict=True))
                points[kind.name, tp, samples] = Point(times, need, sum(times), 3.0 / tp, activation_memory_bytes=kept)
    return cluster, Profiles(model, points), batch


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(["1f1b", "gpipe"]))
def test_the_optimum_is_the_oracles(seed, schedule):
    cluster, profiles, batch = small_case(seed)
    truth = exhaustive(plans(cluster, profiles, batch, schedule), our_cost_ms(cluster, profiles))
    found = search(profiles, cluster, batch, SearchSettings(schedule=schedule, price_limit=100_000))
    assert found.complete
    if truth.plan is None:
        assert found.best is None and found.lower_bound_ms is None
        assert found.rejected
    else:
        assert found.best.cost.total_ms == pytest.approx(truth.cost_ms, rel=1e-9)
        assert found.proven


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6))
def test_the_optimum_of_the_published_formula_is_the_oracles(seed):
    cluster, profiles, batch = small_case(seed)
    memory = {device.index: cluster.device_type(device.type).memory_bytes for device in cluster.devices}

    def cost_ms(plan):
        priced = metis.evaluate(plan, profiles, cluster)
        fits = all(
            need <= memory[device]
            for stage, need in zip(plan.stages, priced.memory_bytes, strict=True)
            for device in stage.devices
        )
        return priced.cost.total_ms if fits else math.inf

    # Metis splits mixed stages in its own way: the oracle has the plans of pure ones.
    pure = [
        plan
        for plan in plans(cluster, profiles, batch)
        if all(len({cluster.devices[d].type for d in stage.devices}) == 1 for stage in plan.stages)
    ]
    truth = exhaustive(pure, cost_ms)
    found = search(profiles, cluster, batch, SearchSettings(cost="metis"))
    assert found.best is not None or truth.plan is None
    if found.best is not None:
        assert found.proven and found.best.cost.total_ms <= truth.cost_ms * (1 + 1e-9)
        again = metis.evaluate(found.best.plan, profiles, cluster)
        assert again.cost.total_ms == pytest.approx(found.lower_bound_ms)
    published = metis.search(profiles, cluster, batch)
    if published.best is not None:
        assert found.best.cost.total_ms <= published.best.cost.total_ms * (1 + 1e-9)


OTHERS = [
    Settings(recompute_activations=True),
    Settings(shard_optimizer=True),
    Settings(shard_parameters=True),
    Settings(sequence_parallel=True),
]


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("seed", range(3))
def test_the_optimum_with_settings(seed, other):
    cluster, profiles, batch = small_case(seed, devices=3, layers=4)
    truth = exhaustive(plans(cluster, profiles, batch, settings=other), our_cost_ms(cluster, profiles, other))
    found = search(profiles, cluster, batch, SearchSettings(plan_settings=(other,), price_limit=100_000))
    assert found.complete
    assert (found.best.cost.total_ms if found.best else math.inf) == pytest.approx(truth.cost_ms, rel=1e-9)


def test_alternative_settings_are_searched_together():
    cluster, profiles, batch = small_case(3)
    alone = [search(profiles, cluster, batch, SearchSettings(plan_settings=(s,))).best for s in (Settings(), *OTHERS)]
    both = search(profiles, cluster, batch, SearchSettings(plan_settings=(Settings(), *OTHERS)))
    assert both.best.cost.total_ms == min(plan.cost.total_ms for plan in alone if plan)


def test_more_memory_fits_with_recomputation():
    cluster, profiles, batch = small_case(0, devices=2, memory_mib=(6000, 6000))
    model = profiles.model
    heavy = Profiles(
        model,
        {
            key: replace(
                point,
                memory_bytes=tuple(m + 2500 * MIB for m in point.memory_bytes),
                activation_memory_bytes=tuple(a + 2500 * MIB for a in point.activation_memory_bytes),
            )
            for key, point in profiles.points.items()
        },
    )
    assert search(heavy, cluster, batch).best is None
    found = search(heavy, cluster, batch, SearchSettings(plan_settings=(Settings(recompute_activations=True),)))
    assert found.best is not None


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.booleans())
def test_the_rules_of_every_plan(seed, unused):
    cluster, profiles, batch = small_case(seed, devices=6, layers=7)
    found = search(profiles, cluster, batch, SearchSettings(allow_unused=unused, price_limit=20))
    memory = {device.index: cluster.device_type(device.type).memory_bytes for device in cluster.devices}
    assert found.plans == tuple(sorted(found.plans, key=lambda plan: plan.cost.total_ms))
    for priced in found.plans:
        plan = priced.plan
        assert sum(stage.end - stage.begin for stage in plan.stages) == profiles.model.layers
        assert all(stage.end > stage.begin for stage in plan.stages)
        assert sum(len(stage.devices) for stage in plan.stages) == len(set().union(*(s.devices for s in plan.stages)))
        if not unused:
            assert sum(stage.dp * stage.tp for stage in plan.stages) == len(cluster.devices)
        for stage in plan.stages:
            assert sum(replica.samples for replica in stage.replicas) * plan.microbatches == batch
            for replica in stage.replicas:
                assert len({(cluster.devices[d].node, cluster.devices[d].type) for d in replica.devices}) == 1
        step = simulate(plan, cluster, profiles)
        assert all(need <= memory[device] for device, need in step.peak_memory_bytes.items())
        assert priced.cost.total_ms == pytest.approx(step.step_time_s * 1e3, rel=0.05)
        assert found.lower_bound_ms <= step.step_time_s * 1e3 * (1 + 1e-9)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**6))
def test_devices_that_only_slow_down_may_be_left_out(seed):
    cluster, profiles, batch = small_case(seed, memory_mib=(9000, 9000))
    all_used = search(profiles, cluster, batch, SearchSettings(price_limit=10_000))
    some = search(profiles, cluster, batch, SearchSettings(allow_unused=True, price_limit=10_000))
    assert some.best.cost.total_ms <= all_used.best.cost.total_ms * (1 + 1e-9)
    used = {device for stage in some.best.plan.stages for device in stage.devices}
    assert bool(some.notes) == (len(used) < len(cluster.devices)) and not all_used.notes
    truth = exhaustive(plans(cluster, profiles, batch, allow_unused=True), our_cost_ms(cluster, profiles))
    assert some.best.cost.total_ms == pytest.approx(truth.cost_ms, rel=1e-9)


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10**6))
def test_the_order_of_the_inputs_does_not_matter(seed):
    cluster, profiles, batch = small_case(seed)
    first = search(profiles, cluster, batch)
    points = Profiles(profiles.model, dict(reversed(profiles.points.items())))
    assert search(points, cluster, batch).plans == first.plans
    other = replace(cluster, device_types=tuple(reversed(cluster.device_types)), links=tuple(reversed(cluster.links)))
    assert search(profiles, other, batch).plans == first.plans


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10**6))
def test_wider_links_and_more_memory_never_hurt_the_published_cost(seed):
    cluster, profiles, batch = small_case(seed)

    def best_ms(of):
        found = search(profiles, of, batch, SearchSettings(cost="metis"))
        return found.best.cost.total_ms if found.best else math.inf

    least = best_ms(cluster)
    assert best_ms(with_links(cluster, 2)) <= least * (1 + 1e-9)
    roomy = tuple(replace(kind, memory_bytes=2 * kind.memory_bytes) for kind in cluster.device_types)
    assert best_ms(replace(cluster, device_types=roomy)) <= least * (1 + 1e-9)


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10**6))
def test_more_memory_never_hurts_and_much_wider_links_help(seed):
    cluster, profiles, batch = small_case(seed)

    def best_ms(of):
        found = search(profiles, of, batch, SearchSettings(price_limit=10_000))
        return found.best.cost.total_ms if found.best else math.inf

    least = best_ms(cluster)
    roomy = tuple(replace(kind, memory_bytes=2 * kind.memory_bytes) for kind in cluster.device_types)
    assert best_ms(replace(cluster, device_types=roomy)) <= least * (1 + 1e-9)
    assert best_ms(with_links(cluster, 1000)) <= least * (1 + 1e-9)


def test_every_input_counts():
    cluster, profiles = uniform(layers=8, devices=4, parameter_bytes=20 * MIB, activation_bytes=MIB, optimizer_ms=5.0)

    def best_ms(profiles=profiles, cluster=cluster, batch=16, max_stages=None):
        return search(profiles, cluster, batch, SearchSettings(max_stages=max_stages)).best.cost.total_ms

    def changed(**values):
        return Profiles(profiles.model, {key: replace(p, **values) for key, p in profiles.points.items()})

    base = best_ms()
    times = {key: replace(p, layer_ms=tuple(t * 1.1 for t in p.layer_ms)) for key, p in profiles.points.items()}
    assert best_ms(Profiles(profiles.model, times)) > base
    assert best_ms(changed(optimizer_ms=50.0)) > base
    assert best_ms(changed(batch_generator_ms=5.0)) > base
    assert best_ms(batch=32) > base
    assert best_ms(cluster=with_links(cluster, 0.1)) > base
    heavy = Profiles(replace(profiles.model, activation_bytes=(20 * MIB,) * 8), profiles.points)
    wide = Profiles(replace(profiles.model, parameter_bytes=(200 * MIB,) * 8), profiles.points)
    assert best_ms(heavy) > base
    assert best_ms(wide, max_stages=1) > best_ms(max_stages=1)  # all data parallel
    tight = replace(cluster, device_types=(replace(cluster.device_types[0], memory_bytes=800 * MIB),))
    assert best_ms(cluster=tight) > base


def test_no_plan_is_not_a_plan_that_costs_nothing():
    cluster, profiles = uniform()
    tiny = replace(cluster, device_types=(replace(cluster.device_types[0], memory_bytes=50 * MIB),))
    none = search(profiles, tiny, 4)
    assert none.best is None and none.plans == () and none.lower_bound_ms is None and not none.proven
    assert {reason.code for reason in none.rejected} >= {"memory"} and all(r.count > 0 for r in none.rejected)
    free = Profiles(
        profiles.model,
        {key: replace(p, layer_ms=(0.0,) * 8, forward_backward_ms=0.0) for key, p in profiles.points.items()},
    )
    assert search(free, cluster, 4).best is not None
    other = Profiles(profiles.model, {("else", tp, b): p for (_, tp, b), p in profiles.points.items()})
    assert {reason.code for reason in search(other, cluster, 4).rejected} == {"profile", "samples"}


def test_a_search_ends_in_time_with_the_best_so_far():
    cluster, profiles, batch = small_case(1, devices=6, layers=12, batch=12)
    seed = search(profiles, cluster, batch).plans[-1].plan
    started = time.monotonic()
    found = search(profiles, cluster, batch, SearchSettings(time_limit_s=0.001, seeds=(seed,)))
    assert time.monotonic() - started < 5
    assert not found.complete and found.best is not None
    assert found.lower_bound_ms <= found.best.cost.total_ms and found.gap >= 0


def test_processes_find_the_same():
    cluster, profiles, batch = small_case(5)
    reports = []
    alone = search(profiles, cluster, batch, progress=reports.append)
    assert {report.step for report in reports} >= {"bound", "beam"}
    assert reports[-1].best_ms == pytest.approx(alone.best.cost.total_ms)
    before = len(multiprocessing.active_children())
    both = search(profiles, cluster, batch, SearchSettings(processes=2, time_limit_s=120))
    assert both.plans == alone.plans and both.lower_bound_ms == alone.lower_bound_ms
    assert len(multiprocessing.active_children()) == before


SEARCHING = """
from triton_ext.planner import presets
from triton_ext.planner.parallel import profile_files
from triton_ext.planner.parallel.search import SearchSettings, search

if __name__ == "__main__":
    profiles, _ = profile_files.read({folder!r})
    cluster = presets.cluster({{"A100-40": 12, "V100-16": 12}})
    given = SearchSettings(time_limit_s=60, processes=2)
    search(profiles, cluster, 96, given, lambda told: print(told.step, flush=True))
"""


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_a_search_that_is_ended_leaves_no_process(tmp_path, number, status):
    """However it ends: its workers see to it themselves."""
    script = tmp_path / "searching.py"
    script.write_text(SEARCHING.format(folder=str(Path(__file__).parents[3] / "examples" / "planner" / "profiles")))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, script], env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert process.stdout.readline()
        started = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(started) >= 3  # two workers, and what follows their resources
        process.send_signal(number)
        assert process.wait(20) == status
        deadline = time.monotonic() + 20
        while (left := [pid for pid in started if running(pid)]) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def die(self, task):
    os._exit(3)


def sleep(self, task):
    time.sleep(600)


@pytest.mark.parametrize(
    ("act", "limit_s", "message"), [(die, 60.0, "has ended unexpectedly"), (sleep, 0.5, "did not end 0.2 s after")]
)
def test_a_worker_that_does_not_answer_is_an_error(monkeypatch, act, limit_s, message):
    cluster, profiles, batch = small_case(5)
    before = set(multiprocessing.active_children())
    monkeypatch.setattr(searching, "_GRACE_S", 0.2)
    monkeypatch.setattr(searching, "_run", functools.partial(act, None))
    with pytest.raises(PlanningError, match=message):
        search(profiles, cluster, batch, SearchSettings(processes=2, time_limit_s=limit_s))
    assert set(multiprocessing.active_children()) == before


def test_an_interleaved_plan():
    cluster, profiles = uniform(layers=16, devices=4)
    given = SearchSettings(schedule="interleaved", plan_settings=(Settings(chunks_per_stage=2),))
    found = search(profiles, cluster, 16, given)
    assert found.best.plan.schedule == "interleaved" and found.lower_bound_ms is None and not found.complete
    step = simulate(found.best.plan, cluster, profiles)
    assert found.best.cost.total_ms == pytest.approx(step.step_time_s * 1e3, rel=0.05)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"schedule": "zigzag"}, "schedule 'zigzag'; there are 1f1b, gpipe, interleaved"),
        ({"cost": "theirs"}, "cost 'theirs'; there are ours, metis"),
        ({"plan_settings": ()}, "plan_settings is empty"),
        ({"time_limit_s": 0}, "time_limit_s is 0"),
        ({"max_stages": 0}, "max_stages is 0"),
    ],
)
def test_wrong_settings(given, message):
    with pytest.raises(PlanningError, match=message):
        SearchSettings(**given)


def test_a_wrong_batch():
    cluster, profiles = uniform()
    with pytest.raises(PlanningError, match="global_batch is 0"):
        search(profiles, cluster, 0)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(["1f1b", "gpipe"]))
def test_no_plan_goes_below_its_bound(seed, schedule):
    cluster, profiles, batch = small_case(seed, memory_mib=(60_000, 60_000))
    problem = OurProblem(profiles, cluster, batch, Space(schedule, 5, False))
    every = list(plans(cluster, profiles, batch, schedule))
    for plan in random.Random(seed).sample(every, min(20, len(every))):
        bounds = []
        for order in range(len(problem.orders)):
            prepared = problem.prepare(Choice(order, plan.microbatches, Settings()))
            numbers = {group.replicas: number for number, group in enumerate(prepared.options.groups)}
            groups = [numbers.get(tuple(r.devices for r in stage.replicas)) for stage in plan.stages]
            if None not in groups:
                bounds.append(bound_s(prepared.bound, groups, plan))
                assert problem.least_s(prepared) <= bounds[-1] * (1 + 1e-9)
        assert bounds and max(bounds) <= simulate(plan, cluster, profiles).step_time_s * (1 + 1e-9)


def bound_s(objective, groups, plan):
    rows, after = np.zeros((objective.columns, 1)), np.array([-1])
    for behind, (group, stage) in enumerate(zip(reversed(groups), reversed(plan.stages), strict=True), 1):
        option, begin, end = np.array([group]), np.array([stage.begin]), np.array([stage.end])
        rows = objective.extended(rows, option, begin, end, behind, after)
        after = option
    return float(objective.total_s(rows)[0])
