"""Our search: equal to the oracle, within its bounds, and with the rules that every plan keeps."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_plans import MIB

from triton_ext.planner.cluster import DeviceType, Fabric, Node, star
from triton_ext.planner.parallel.oracle import exhaustive, our_cost_ms, plans
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
    found = search(profiles, cluster, batch, SearchSettings(schedule, price_limit=100_000))
    assert found.complete
    if truth.plan is None:
        assert found.best is None and found.lower_bound_ms is None
        assert found.rejected
    else:
        assert found.best.cost.total_ms == pytest.approx(truth.cost_ms, rel=1e-9)
        assert found.proven
