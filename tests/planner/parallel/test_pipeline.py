"""The pipeline simulator: what can be computed by hand, what must hold for every plan, and the cost model beside it."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_plans import MIB, pipeline, random_case, uniform, with_links

from triton_ext.errors import PlanningError
from triton_ext.planner.parallel.cost import estimate
from triton_ext.planner.parallel.flows import Flow, FlowNetwork
from triton_ext.planner.parallel.pipeline import ALL_REDUCE, BACKWARD, FORWARD, OPTIMIZER, simulate
from triton_ext.planner.parallel.plan import ParallelPlan, Replica, Settings, Stage
from triton_ext.planner.parallel.schedule import layer_runs, operations


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (1, 5), (2, 1), (2, 6), (4, 3), (4, 9)])
def test_equal_stages_without_communication(schedule, stages, microbatches):
    cluster, profiles = uniform()
    step = simulate(pipeline(stages, microbatches, schedule=schedule), cluster, profiles)
    stage_s = 3e-3 * 8 / stages
    assert step.step_time_s == pytest.approx((microbatches + stages - 1) * stage_s)
    assert step.bubble == pytest.approx((stages - 1) / (microbatches + stages - 1))
    assert step.exposed_communication == 0


def test_interleaving_divides_the_bubble_by_its_chunks():
    cluster, profiles = uniform()
    for chunks in (1, 2):
        plan = pipeline(4, 8, schedule="interleaved", settings=Settings(chunks_per_stage=chunks))
        step = simulate(plan, cluster, profiles)
        assert step.step_time_s == pytest.approx(8 * 6e-3 + 3 * 6e-3 / chunks)


def test_interleaved_rounds_must_be_full():
    cluster, profiles = uniform()
    plan = pipeline(4, 6, schedule="interleaved", settings=Settings(chunks_per_stage=2))
    with pytest.raises(PlanningError, match="6 micro-batches over 4 stages"):
        simulate(plan, cluster, profiles)


def test_interleaved_layers_are_dealt_in_order():
    plan = pipeline(2, 2, layers=8, schedule="interleaved", settings=Settings(chunks_per_stage=2))
    assert layer_runs(plan) == (((0, 2), (4, 6)), ((2, 4), (6, 8)))
    with pytest.raises(PlanningError, match="stage 0 has 1 layers for 2 chunks"):
        layer_runs(pipeline(4, 4, layers=4, schedule="interleaved", settings=Settings(chunks_per_stage=2)))


def test_one_transfer_each_way_is_exposed_with_one_microbatch():
    cluster, profiles = uniform(activation_bytes=10_000_000, net=1e9)
    step = simulate(pipeline(2, 1), cluster, profiles)
    assert step.step_time_s == pytest.approx(24e-3 + 2 * 10e-3)
    assert [(s.source_device, s.destination_device, s.forward) for s in step.sent] == [(0, 1, True), (1, 0, False)]
    # The second stage waits for 10 ms of transfer and 4 ms of compute before it, which are bubble.
    assert step.exposed_communication_s == pytest.approx({0: 10e-3, 1: 10e-3})


def test_transfers_are_hidden_behind_computation():
    cluster, profiles = uniform(activation_bytes=100_000, net=1e9)
    hidden = simulate(pipeline(2, 32), cluster, profiles).step_time_s
    # A round trip of two micro-batches contains two transfers, so each adds half of its two: 0.1 ms.
    assert hidden == pytest.approx(33 * 12e-3 + 32 * 0.1e-3 + 0.1e-3, rel=1e-3)


def test_flows_share_a_link_fairly():
    network = FlowNetwork({("link", 0): 10.0, ("link", 1): 2.0})
    one, two = Flow(100.0, ((("link", 0), 1.0),)), Flow(100.0, ((("link", 0), 1.0), (("link", 1), 1.0)))
    network.start(one, 0.0)
    assert network.settle(0.0) == [one] and one.rate == 10
    network.start(two, 5.0)
    assert set(network.settle(5.0)) == {one, two}
    assert (one.rate, two.rate) == (8, 2) and one.remaining_bytes == 50
    network.end(one)
    assert network.settle(one.end_s) == [] and two.rate == 2


def test_the_all_reduce_of_two_replicas():
    cluster, profiles = uniform(layers=4, parameter_bytes=1_000_000, optimizer_ms=2.0, net=1e9)
    plan = pipeline(1, 3, layers=4, dp=2)
    step = simulate(plan, cluster, profiles)
    # Each of two replicas sends 2 * (2 - 1) / 2 times 4 MB; three micro-batches of four layers; the optimizer.
    assert step.step_time_s == pytest.approx(3 * 12e-3 + 4e-3 + 2e-3)
    assert step.exposed_communication_s[0] == pytest.approx(4e-3)
    sharded = simulate(replace(plan, settings=Settings(shard_optimizer=True)), cluster, profiles)
    assert sharded.step_time_s == pytest.approx(3 * 12e-3 + 4e-3 + 1e-3)


def test_two_stages_that_reduce_over_one_link_take_turns():
    cluster, profiles = uniform(layers=2, devices=4, parameter_bytes=50_000_000, net=1e9)
    apart = ParallelPlan(
        (Stage(0, 1, (Replica((0,), 1), Replica((1,), 1))), Stage(1, 2, (Replica((2,), 1), Replica((3,), 1)))), 1, 2
    )
    step = simulate(apart, cluster, profiles)
    assert step.step_time_s == pytest.approx(6e-3 + 50e-3)
    end = {e.stage: e.end_s for e in step.events if e.kind == ALL_REDUCE}
    assert end == pytest.approx({0: 56e-3, 1: 54e-3})


def test_memory_holds_as_many_microbatches_as_are_in_flight():
    cluster, profiles = uniform(parameter_bytes=MIB)
    for schedule, flights in (("1f1b", (4, 3, 2, 1)), ("gpipe", (6, 6, 6, 6))):
        step = simulate(pipeline(4, 6, schedule=schedule), cluster, profiles)
        assert step.peak_memory_bytes == {s: 2 * 4 * MIB + n * 200 * MIB for s, n in enumerate(flights)}


def test_settings_save_memory():
    cluster, profiles = uniform(parameter_bytes=16 * MIB, activation_bytes=4 * MIB)

    def first(**given):
        step = simulate(pipeline(2, 4, layers=8, dp=2, settings=Settings(**given)), cluster, profiles)
        return step.peak_memory_bytes[0]

    plain = first()
    assert plain == 4 * (64 * MIB + 2 * 100 * MIB)
    assert first(shard_optimizer=True) == plain - 4 * 16 * MIB
    assert first(shard_parameters=True) == plain - 4 * 32 * MIB
    # Of a micro-batch, each layer's input (the first has none), and the rest of one layer while it is computed again.
    assert first(recompute_activations=True) == 4 * 64 * MIB + 2 * 3 * 4 * MIB + 100 * MIB


def test_recomputation_costs_a_forward():
    cluster, profiles = uniform()
    again = simulate(pipeline(1, 3, settings=Settings(recompute_activations=True)), cluster, profiles)
    assert again.step_time_s == pytest.approx(3 * 8 * 4e-3)


def test_sharded_parameters_are_gathered_twice_and_scattered_once():
    cluster, profiles = uniform(layers=4, parameter_bytes=1_000_000, net=1e9)
    step = simulate(pipeline(1, 3, layers=4, dp=2, settings=Settings(shard_parameters=True)), cluster, profiles)
    assert step.step_time_s == pytest.approx(3 * (12e-3 + 3 * 2e-3))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved"])
def test_every_microbatch_goes_forward_and_back_in_every_stage(schedule):
    for stage in range(4):
        order = operations(schedule, stage, 4, 8, 2 if schedule == "interleaved" else 1)
        forwards = [(o.microbatch, o.chunk) for o in order if o.forward]
        backwards = [(o.microbatch, o.chunk) for o in order if not o.forward]
        assert len(order) == len(set(order)) and sorted(forwards) == sorted(backwards)
        for o in order:
            if not o.forward:
                assert order.index(o._replace(forward=True)) < order.index(o)


def test_a_plan_of_another_model_or_cluster():
    cluster, profiles = uniform(layers=7, devices=2)
    with pytest.raises(PlanningError, match="the plan has 8 layers, the model uniform 7"):
        simulate(pipeline(2, 2), cluster, profiles)
    with pytest.raises(PlanningError, match="device 2; the cluster has devices 0 to 1"):
        simulate(ParallelPlan((Stage(0, 7, (Replica((2,), 1),)),), 1, 1), cluster, profiles)
    with pytest.raises(PlanningError, match="micro-batch 9 is outside the profiled range"):
        simulate(ParallelPlan((Stage(0, 7, (Replica((0,), 9),)),), 1, 9), cluster, profiles)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(["1f1b", "gpipe"]), st.booleans())
def test_every_step(seed, schedule, in_order):
    cluster, profiles, plan = random_case(seed, schedule, microbatches=(1, 2, 5, 8), devices_in_order=in_order)
    step = simulate(plan, cluster, profiles)
    devices = {device for stage in plan.stages for device in stage.devices}
    assert set(step.compute_s) == set(step.exposed_communication_s) == set(step.peak_memory_bytes) == devices
    for device in devices:
        mine = sorted((e.start_s, e.end_s, e.kind) for e in step.events if e.device == device)
        assert all(a[1] <= b[0] + 1e-12 for a, b in itertools.pairwise(mine))  # one thing at a time
        assert sum(kind == FORWARD for *_, kind in mine) == sum(kind == BACKWARD for *_, kind in mine)
        assert sum(kind == FORWARD for *_, kind in mine) == plan.microbatches
        assert mine[-1][2] == OPTIMIZER
        assert step.compute_s[device] + step.exposed_communication_s[device] <= step.step_time_s * (1 + 1e-9)
    assert step.step_time_s >= max(step.compute_s.values())
    assert simulate(plan, cluster, profiles) == step  # deterministic


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6))
def test_much_wider_links_never_hurt(seed):
    cluster, profiles, plan = random_case(seed, microbatches=(1, 2, 5, 8))
    slow = simulate(plan, cluster, profiles).step_time_s
    assert simulate(plan, with_links(cluster, 100), profiles).step_time_s <= slow * (1 + 1e-9)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("seed", range(30))
def test_the_cost_model_is_within_5_percent_of_the_simulator(seed, schedule):
    cluster, profiles, plan = random_case(seed, schedule, most_stages=4, microbatches=(2, 16, 40))
    step, cost = simulate(plan, cluster, profiles), estimate(plan, cluster, profiles)
    assert cost.step_time_s == pytest.approx(step.step_time_s, rel=0.05)
    assert cost.memory_bytes == step.peak_memory_bytes
    parts = cost.compute_s + cost.pipeline_s + cost.all_reduce_s + cost.optimizer_s
    assert parts == pytest.approx(cost.step_time_s)


def test_the_cost_of_an_interleaved_plan():
    cluster, profiles = uniform(activation_bytes=1_000_000)
    plan = pipeline(4, 64, schedule="interleaved", settings=Settings(chunks_per_stage=2))
    step, cost = simulate(plan, cluster, profiles), estimate(plan, cluster, profiles)
    assert cost.step_time_s == pytest.approx(step.step_time_s, rel=0.02)
    assert cost.memory_bytes == step.peak_memory_bytes


def test_a_device_whose_memory_does_not_suffice_is_named():
    cluster, profiles = uniform(layers=8, devices=4)
    small = replace(cluster, device_types=(replace(cluster.device_types[0], memory_bytes=700 * MIB),))
    cost = estimate(pipeline(4, 6), small, profiles)  # 4, 3, 2 and 1 micro-batches of 200 MiB
    assert cost.over_memory(small) == (0,) and cost.over_memory(cluster) == ()
