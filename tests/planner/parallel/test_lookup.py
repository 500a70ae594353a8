"""Points for a search: measured before interpolated before modelled, and gaps with their reason."""

import pytest

from metis_table import metis_profiles
from triton_ext.planner import presets
from triton_ext.planner.parallel.lookup import Lookup
from triton_ext.planner.parallel.profiles import Gap, Point, Profiles

A = "A100-80"
CLUSTER = presets.cluster({A: 2, "T4": 2})


@pytest.mark.parametrize(
    ("key", "source", "without"),
    [
        ((A, 2, 4), "measured", "measured"),
        ((A, 2, 3), "interpolated", "interpolated"),
        ((A, 3, 2), "interpolated", "interpolated"),
        ((A, 2, 8), "modelled", "microbatch"),
        ((A, 8, 1), "modelled", "tp"),
        (("T4", 1, 1), "modelled", "type"),
    ],
)
def test_where_points_come_from(key, source, without):
    point = Lookup(metis_profiles(), CLUSTER, model_missing=True).get(*key)
    assert isinstance(point, Point) and point.source == source
    plain = Lookup(metis_profiles(), CLUSTER).get(*key)
    assert (plain.code if isinstance(plain, Gap) else plain.source) == without


def test_a_type_that_neither_profiles_nor_cluster_know():
    gap = Lookup(metis_profiles(), CLUSTER, model_missing=True).get("H100-80", 1, 1)
    assert isinstance(gap, Gap) and gap.code == "type" and "H100-80" in gap.reason


def test_the_smallest_micro_batch():
    points = {key: point for key, point in metis_profiles().points.items() if key[2] > 1}
    lookup = Lookup(Profiles(metis_profiles().model, points), CLUSTER)
    assert lookup.smallest(A, 1) == (2, points[A, 1, 2])
    gap = lookup.smallest(A, 16)
    assert isinstance(gap, Gap) and gap.code == "tp"
    assert Lookup(metis_profiles(), CLUSTER).smallest(A, 4)[0] == 1
