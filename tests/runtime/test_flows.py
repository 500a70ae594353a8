"""Which ranks' slices travel together: every element that goes to another host is covered, once, by the right flow."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triton_ext.errors import PlanError
from triton_ext.passes import abi, dialect
from triton_ext.runtime import flows, layout
from triton_ext.runtime.flows import Placement

PLACED = st.lists(st.sampled_from("abc"), min_size=1, max_size=7)


def plan(collective, world):
    shapes = [(24, 8)] * world
    spec = dialect.Spec(collective, 2, "fp32", "fp32", "fp32", 0, 1, transport=dialect.PROXY)
    if collective == "all_to_all":
        return spec, layout.all_to_all(shapes, 0, 0)
    if collective == "all_reduce":
        return spec, layout.all_reduce(shapes, 0)
    if collective == "reduce_scatter":
        return spec, layout.reduce_scatter(shapes, 0)
    return spec, layout.all_gather(shapes, 0)


@given(PLACED, st.sampled_from(["all_to_all", "all_reduce", "reduce_scatter", "all_gather"]))
def test_direct_and_hierarchical_cover_the_same_pairs(hosts, collective):
    spec, where = plan(collective, len(hosts))

    def pairs(name):
        found = [
            (flow.kind, *pair)
            for flow in Placement.of(name, hosts).flows(spec, where)
            for pair in itertools.product(flow.sources, flow.destinations)
        ]
        assert len(found) == len(set(found))
        return set(found)

    assert pairs("hierarchical") == pairs("direct")
    assert all(hosts[source] != hosts[destination] for _, source, destination in pairs("direct"))


@given(PLACED, st.sampled_from(flows.SCHEDULES))
def test_connections_are_symmetric_and_reach_all(hosts, name):
    schedule = Placement.of(name, hosts)
    for rank in range(len(hosts)):
        for other in schedule.connected(rank):
            assert rank in schedule.connected(other)
        for far in schedule.far(rank):
            gateway, there = schedule.gateways[rank], schedule.gateways[far]
            assert rank == gateway or schedule.connected(rank) == [gateway]
            assert there in schedule.connected(gateway) and hosts[gateway] == hosts[rank]


@given(PLACED)
def test_what_a_hierarchy_sends_for_an_all_reduce(hosts):
    """Between two hosts, each owner's part once each way, however many ranks they have."""
    spec, where = plan("all_reduce", len(hosts))
    found = Placement.of("hierarchical", hosts).flows(spec, where)
    for kind, end in ((abi.OF_STAGE, "destinations"), (abi.OF_RESULT, "sources")):
        sent = [
            (hosts[flow.sources[0]], hosts[flow.destinations[0]], getattr(flow, end))
            for flow in found
            if flow.kind == kind
        ]
        assert (
            len(sent)
            == len(set(sent))
            == sum(len(set(hosts)) - 1 for rank in range(len(hosts)) if rank * -(-24 // len(hosts)) < 24)
        )


@given(PLACED)
def test_a_sum_is_expected_once(hosts):
    _, where = plan("all_reduce", len(hosts))
    schedule = Placement.of("hierarchical", hosts)
    expected = schedule.expectations(where)
    for source, destination in itertools.product(range(len(hosts)), repeat=2):
        before, after = where.routes[source][destination], expected.routes[source][destination]
        is_first = schedule.sender(source, destination) == source
        assert after.expected == (before.expected if is_first else 0)
        assert after.expected_reduced == before.expected_reduced


@pytest.mark.parametrize(
    ("name", "collective", "text"),
    [("ring", "all_reduce", "there are direct, hierarchical"), ("hierarchical", dialect.ONE_SHOT, "use shots=2")],
)
def test_schedules_that_are_none(name, collective, text):
    with pytest.raises(PlanError, match=text):
        flows.check(name, collective)
