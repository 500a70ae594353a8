"""Predicted times: closed forms, the bound of cuts, and what has to make them longer or shorter."""

import itertools
import math
from dataclasses import replace

import pytest
from clusters_for_schedules import GPU, clusters, one_node, requests, several
from cut_bounds import cut_bound_s
from hypothesis import given, settings
from hypothesis import strategies as st

from triton_ext.errors import PlanningError
from triton_ext.planner.cluster import Cluster, Fabric, Link, Node
from triton_ext.planner.schedules import Choice, Costs, Decision, Request, choose

US = 1e-6


def alone_us(decision: Decision, name: str, slices: int = 1) -> float:
    """The stand-alone time of a schedule among the candidates."""
    (time,) = {c.standalone_s for c in decision.candidates if (c.choice.schedule, c.choice.slices) == (name, slices)}
    return time / US


def all_reduce(cluster: Cluster, nbytes: int, **options: object) -> Request:
    world = len(cluster.devices)
    return Request("all_reduce", nbytes, "float32", 1024, 0.0, tuple(range(world)), **options)


@pytest.mark.parametrize(
    ("nbytes", "ring", "halving_doubling", "tree", "two_shot"),
    [(4_000, 28.3, 12.3, 13.0, 4.3), (1_000_000, 98, 82, 252, 74), (64_000_000, 4508, 4492, 15372, 4484)],
)
def test_published_values(nbytes, ring, halving_doubling, tree, two_shot):
    """Eight ranks, 2 us, 25 GB/s."""
    decision = choose(all_reduce(one_node(8), nbytes), one_node(8))
    found = [alone_us(decision, name) for name in ("ring", "halving_doubling", "tree", "two_shot")]
    assert found == pytest.approx([ring, halving_doubling, tree, two_shot], rel=5e-3)


@pytest.mark.parametrize("world", range(2, 10))
def test_closed_forms(world):
    alpha, beta, nbytes = 2.0, 1 / 25e3, 4 * 2520 * 64  # us, us/B; a multiple of every world
    decision = choose(all_reduce(one_node(world), nbytes), one_node(world))
    bandwidth = 2 * (world - 1) / world * nbytes * beta
    assert alone_us(decision, "ring") == pytest.approx(2 * (world - 1) * alpha + bandwidth)
    assert alone_us(decision, "two_shot") == pytest.approx(2 * alpha + bandwidth)
    assert alone_us(decision, "one_shot") == pytest.approx(alpha + (world - 1) * nbytes * beta)
    assert alone_us(decision, "tree") == pytest.approx(2 * math.ceil(math.log2(world)) * (alpha + nbytes * beta))
    core = 1 << int(math.log2(world))
    folded = 2 * (alpha + nbytes * beta) if world != core else 0.0  # extras: all of it, there and back
    halving = 2 * math.log2(core) * alpha + 2 * (core - 1) / core * nbytes * beta
    assert alone_us(decision, "halving_doubling") == pytest.approx(halving + folded)


def mesh(world: int) -> Cluster:
    """Nodes of one device, with a cable between each two."""
    names = [f"n{i}" for i in range(world)]
    links = [Link(a, b, 25e9, 2e-6) for a, b in itertools.permutations(names, 2)]
    return Cluster((GPU,), tuple(Node(name, ("gpu",), Fabric(1e9, 0)) for name in names), (), tuple(links))


@pytest.mark.parametrize("world", [2, 3, 5, 8])
def test_links_of_their_own(world):
    """With n - 1 ways out of a rank, one shot takes one tensor's time, and a tree's chunks do not meet."""
    cluster, nbytes, levels = mesh(world), 1 << 20, math.ceil(math.log2(world))
    decision = choose(all_reduce(cluster, nbytes), cluster)
    assert alone_us(decision, "one_shot") == pytest.approx(2 + nbytes / 25e3)
    for chunks in (1, 4, 32):
        form = 2 * (levels + chunks - 1) * (2 + nbytes / chunks / 25e3)
        assert alone_us(decision, "tree", chunks) == pytest.approx(form)


@pytest.mark.parametrize(("ranks", "nodes"), [(4, 2), (2, 4), (3, 3), (8, 2)])
def test_hierarchical_closed_form(ranks, nodes):
    """A card per node, which its ranks share: 2 (g-1)/g N at the fabric's speed, 2 (m-1)/m N at the card's."""
    cluster = several([ranks] * nodes)
    nbytes = 4 * ranks * nodes * 5000
    decision = choose(all_reduce(cluster, nbytes), cluster)
    inside = 2 * 3 + 2 * (ranks - 1) / ranks * nbytes / 300e3
    outside = 2 * 2 * 5 + 2 * (nodes - 1) / nodes * nbytes / 25e3
    assert alone_us(decision, "hierarchical") == pytest.approx(inside + outside)


@pytest.mark.parametrize("name", ["unfused", "two_shot"])
def test_costs_of_messages_and_steps(name):
    costs = Costs(put_s=3e-6, flag_s=5e-6, sum_bytes_per_s=1e9, library_call_s=70e-6, library_step_s=11e-6)
    nbytes = 4 * 4 * 4000
    decision = choose(all_reduce(one_node(4), nbytes, costs=costs), one_node(4))
    link_us, sums_us = 3 / 4 * nbytes / 25e3, 3 / 4 * nbytes / 1e3
    if name == "two_shot":  # the puts to three peers take longer than the bytes
        assert alone_us(decision, "two_shot", 1) == pytest.approx(2 * (3 * 3 + 2 + 5) + sums_us)
        assert alone_us(decision, "two_shot", 8) == pytest.approx(2 * (8 * 3 * 3 + 2 + 5) + sums_us)
    else:
        assert alone_us(decision, "unfused") == pytest.approx(70 + 2 * (2 + 11) + 2 * link_us + sums_us)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_never_better_than_the_bound_of_cuts(data):
    cluster = data.draw(clusters(7))
    request = data.draw(requests(cluster))
    bound_s = cut_bound_s(request, cluster) * (1 - 1e-9)
    for candidate in choose(request, cluster).candidates:
        assert candidate.standalone_s >= bound_s, candidate
        assert candidate.total_s >= max(bound_s, request.compute_s * (1 - 1e-9)), candidate
        assert candidate.total_s <= (request.compute_s + candidate.standalone_s) * (1 + 1e-9), candidate


def test_the_bound_is_reached():
    """By a direct all_to_all: its busiest link is the narrowest cut."""
    cluster = several([2, 2], fabric_s=0, link_s=0, link_bytes_per_s=1e9)
    request = Request("all_to_all", 4 * 4 * 1000, "float32", 1, 0.0, (0, 1, 2, 3))
    assert cut_bound_s(request, cluster) == pytest.approx(2 * 2 * 4000 / 1e9)
    assert choose(request, cluster).chosen.standalone_s == pytest.approx(2 * 2 * 4000 / 1e9)
    with pytest.raises(PlanningError, match="13 ranks would take too long"):
        cut_bound_s(replace(request, group=tuple(range(13))), one_node(13))


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_ranks_may_be_numbered_in_any_way(data):
    cluster = data.draw(clusters())
    request = data.draw(requests(cluster))
    ranks = data.draw(st.permutations(range(request.world)))  # rank r is now called ranks[r]
    group, puts = [0] * request.world, [None] * len(request.destinations)
    for rank, device in enumerate(request.group):
        group[ranks[rank]] = device
    for rank, there in enumerate(request.destinations):
        puts[ranks[rank]] = None if there is None else ranks[there]
    root = ranks[request.root] if request.collective == "broadcast" else 0
    other = replace(request, group=tuple(group), root=root, destinations=tuple(puts))
    assert choose(other, cluster).candidates == choose(request, cluster).candidates
    assert choose(other, cluster).choice == choose(request, cluster).choice


def times(decision: Decision) -> dict[Choice, float]:
    return {candidate.choice: candidate.total_s for candidate in decision.candidates}


def assert_not_faster(slow: Decision, fast: Decision) -> None:
    before, after = times(fast), times(slow)
    for choice in before.keys() & after.keys():
        assert after[choice] >= before[choice] * (1 - 1e-9), choice
    assert slow.chosen.total_s >= fast.chosen.total_s * (1 - 1e-5)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_more_bytes_never_take_less_time(data):
    cluster = data.draw(clusters())
    request = data.draw(requests(cluster))
    more = replace(request, tensor_bytes=request.tensor_bytes + 4 * data.draw(st.integers(1, 1 << 22)))
    assert_not_faster(choose(more, cluster), choose(request, cluster))


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_a_wider_or_quicker_link_never_takes_more_time(data):
    cluster = data.draw(clusters())
    request = data.draw(requests(cluster))
    factor = data.draw(st.sampled_from([1.01, 2, 10]))
    links, nodes = list(cluster.links), list(cluster.nodes)
    what = data.draw(st.sampled_from(["fabric", "bandwidth", "latency"]))
    index = data.draw(st.integers(0, len(links if what != "fabric" else nodes) - 1))
    if what == "fabric":
        fabric = replace(nodes[index].fabric, bandwidth_bytes_per_s=nodes[index].fabric.bandwidth_bytes_per_s * factor)
        nodes[index] = replace(nodes[index], fabric=fabric)
    elif what == "bandwidth":
        links[index] = replace(links[index], bandwidth_bytes_per_s=links[index].bandwidth_bytes_per_s * factor)
    else:
        links[index] = replace(links[index], latency_s=links[index].latency_s / factor)
    better = replace(cluster, nodes=tuple(nodes), links=tuple(links))
    assert_not_faster(choose(request, cluster), choose(request, better))


BASE = Request(
    "all_reduce", 4 * 7 * 10_000, "float32", 280, 1e-7, tuple(range(7)), slices=(4,), orders=("remote_first",),
    costs=Costs(1e-7, 1e-6, 3e-7, 2e-6, 1e-7, 50e9, 20e-6, 5e-6),
)  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"tensor_bytes": BASE.tensor_bytes * 2},
        {"tensor_bytes": BASE.tensor_bytes - 4, "dtype": "float32"},
        {"collective": "reduce_scatter"},
        {"tile_compute_s": 3e-7},
        {"tiles": 35, "tile_compute_s": 8e-7},
        {"slices": (1,)},
        {"orders": ("in_order",)},
        {"group": (0, 1, 2, 4)},
        {"group": (0, 1, 4, 5)},
        {"unfused_compute_s": 1e-3},
        {"costs": replace(BASE.costs, put_s=1e-6)},
        {"costs": replace(BASE.costs, send_s=2e-6)},
        {"costs": replace(BASE.costs, flag_s=9e-6)},
        {"costs": replace(BASE.costs, arrive_s=9e-6)},
        {"costs": replace(BASE.costs, stolen_s=9e-7)},
        {"costs": replace(BASE.costs, sum_bytes_per_s=10e9)},
        {"costs": replace(BASE.costs, library_call_s=0.0)},
        {"costs": replace(BASE.costs, library_step_s=0.0)},
    ],
    ids=str,
)
def test_every_input_counts(change):
    cluster = several([4, 3])
    assert sorted(times(choose(replace(BASE, **change), cluster)).values()) != pytest.approx(
        sorted(times(choose(BASE, cluster)).values()), rel=1e-6
    )


def test_every_figure_of_the_cluster_counts():
    seen = set()
    for options in (
        {},
        {"fabric_bytes_per_s": 100e9},
        {"link_bytes_per_s": 12e9},
        {"fabric_s": 1e-6},
        {"link_s": 1e-6},
    ):
        for sizes in ([4, 3], [5, 2], [7]) if not options else ([4, 3],):
            seen.add(tuple(round(t * 1e12) for t in times(choose(BASE, several(sizes, **options))).values()))
    assert len(seen) == 7


def test_elements_are_not_cut():
    """24 bytes for two ranks: three numbers of 8 bytes make parts of 16, six of 4 bytes parts of 12."""
    cluster = one_node(2, latency_s=0.0)
    request = Request("reduce_scatter", 24, "float64", 1, 0.0, (0, 1))
    assert choose(request, cluster).chosen.standalone_s == pytest.approx(16 / 25e9)
    assert choose(replace(request, dtype="float32"), cluster).chosen.standalone_s == pytest.approx(12 / 25e9)


def test_compute_hides_communication():
    """An all_to_all of four slices: as long as the computation keeps ahead, only the last slice shows."""
    cluster = one_node(2, latency_s=1e-6)
    request = Request("all_to_all", 8_000_000, "float32", 8, 400e-6 / 8, (0, 1), slices=(4,), orders=("remote_first",))
    decision = choose(replace(request, executable=frozenset({"one_shot"})), cluster)
    # 160 us of bytes, in slices of 40 us that are ready every 50 us until 200 us; own tiles take until 400 us.
    assert decision.chosen.exposed_s == pytest.approx(0, abs=1e-12)
    assert decision.chosen.standalone_s == pytest.approx(161e-6)
    ahead = replace(request, orders=("in_order",), executable=frozenset({"one_shot"}))
    # Rank 0's tiles for itself come first, so its peer's last slice is ready at 400 us, and takes 41 us.
    assert choose(ahead, cluster).chosen.exposed_s == pytest.approx(41e-6)
    slow = replace(request, tile_compute_s=40e-6 / 8, executable=frozenset({"one_shot"}))
    # Ready after 5 us, then the link is never idle until all is sent.
    assert choose(slow, cluster).chosen.total_s == pytest.approx(5e-6 + 160e-6 + 1e-6)
