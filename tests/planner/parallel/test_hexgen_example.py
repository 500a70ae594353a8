"""The example of HexGen (Jiang et al., ICML 2024): Llama-2-70B on 4 A6000, 2 A5000 and 2 A4000, where plans with equal
stages do not fit, and 48, 20 and 12 layers with tensor parallelism 4, 2 and 2 do."""

import itertools

from triton_ext.planner import presets
from triton_ext.planner.parallel import oracle, space
from triton_ext.planner.parallel.plan import ParallelPlan, Replica, Stage
from triton_ext.planner.parallel.profiles import Model, Point, Profiles
from triton_ext.planner.parallel.search import SearchSettings, search

COUNTS = {"RTX-A6000": 4, "RTX-A5000": 2, "RTX-A4000": 2}
LAYERS, HIDDEN, TOKENS, BATCH = 80, 8192, 4096, 16
LAYER_PARAMETERS = 856e6  # of 69e9 in 80 layers
CLUSTER = presets.cluster(COUNTS)


def profiles():
    """Forward only, weights in 16 bits, at half of the peak; each doubling of the degree costs 4 %."""
    weights, activation = int(2 * LAYER_PARAMETERS), 2 * TOKENS * HIDDEN
    points = {}
    for name in COUNTS:
        rate = presets.device_type(name).peak_flop_per_s / 2
        for power, samples in itertools.product((0, 1, 2), (1, 2, 4)):
            tp = 1 << power
            ms = 2e3 * LAYER_PARAMETERS * TOKENS * samples / rate / tp * 1.04**power
            cache = 4 * TOKENS * HIDDEN * samples // 8 // tp  # keys and values of 8 of 64 heads
            points[name, tp, samples] = Point(
                (ms,) * LAYERS,
                (weights // tp + cache,) * LAYERS,
                ms * LAYERS,
                0.0,
                forward_share=1.0,
                activation_memory_bytes=(cache,) * LAYERS,
            )
    return Profiles(Model("Llama-2-70B", (0,) * LAYERS, (activation,) * LAYERS), points)


def plan(sizes, tps, devices=range(8), batches=BATCH):
    edges, used = [0, *itertools.accumulate(sizes)], iter(devices)
    stages = [
        Stage(a, b, (Replica(tuple(itertools.islice(used, tp)), BATCH // batches),))
        for (a, b), tp in zip(itertools.pairwise(edges), tps, strict=True)
    ]
    return ParallelPlan(tuple(stages), batches, BATCH)


def test_equal_stages_do_not_fit_and_the_published_plan_does():
    cost_ms = oracle.our_cost_ms(CLUSTER, profiles())
    for stages in (2, 4, 8):
        for order in space.orders(CLUSTER):
            assert cost_ms(plan((LAYERS // stages,) * stages, (8 // stages,) * stages, order.devices)) == float("inf")
    assert cost_ms(plan((48, 20, 12), (4, 2, 2))) < float("inf")


def test_the_search_finds_stages_like_the_published_ones():
    published_ms = oracle.our_cost_ms(CLUSTER, profiles())(plan((48, 20, 12), (4, 2, 2)))
    found = search(profiles(), CLUSTER, BATCH, SearchSettings(max_stages=3))
    assert found.best.cost.total_ms <= published_ms
    layers = {
        name: sum(
            stage.end - stage.begin
            for stage in found.best.plan.stages
            if {CLUSTER.devices[device].type for device in stage.devices} == {name}
        )
        for name in COUNTS
    }
    degrees = sorted(stage.tp for stage in found.best.plan.stages)
    assert degrees == [2, 2, 4]
    assert sum(layers.values()) == LAYERS
    assert abs(layers["RTX-A6000"] - 48) <= 3 and abs(layers["RTX-A5000"] - 20) <= 3
    assert abs(layers["RTX-A4000"] - 12) <= 2
