"""Points between measured ones: inside the range, said to be interpolated, never outside."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metis_table import metis_profiles, shared_profiles
from triton_ext.planner.parallel import profile_files
from triton_ext.planner.parallel.completion import interpolate
from triton_ext.planner.parallel.profiles import Gap, Model, Point, Profiles

PARAMETERS, REPLICATED = 4000, 400


def power_law(tps=(1, 2, 8), sizes=(1, 4, 16)):
    """Times that are power laws, and memory that is affine: interpolation is exact."""
    points = {}
    for tp in tps:
        for samples in sizes:
            shard = REPLICATED + PARAMETERS // tp
            time = 3.0 * samples**0.9 * tp**-0.8
            points["X", tp, samples] = Point(
                (time, 2 * time), (5 * shard + 80 * samples, 6 * shard), 3 * time, 7.0 * tp**-1,
                activation_memory_bytes=(80 * samples, 0), parameter_bytes=(shard, shard),
            )  # fmt: skip
    return Profiles(Model("m", (PARAMETERS + REPLICATED,) * 2, (8, 8)), points)


@settings(deadline=None)
@given(st.integers(1, 16), st.integers(1, 8))
def test_exact_for_power_laws(samples, tp):
    point = interpolate(power_law(), ("X", tp, samples))
    assert isinstance(point, Point)
    time = 3.0 * samples**0.9 * tp**-0.8
    assert point.layer_ms == pytest.approx((time, 2 * time)) and point.forward_backward_ms == pytest.approx(3 * time)
    assert point.optimizer_ms == pytest.approx(7.0 / tp)
    shard = REPLICATED + PARAMETERS / tp
    assert point.parameter_bytes[0] == pytest.approx(shard, abs=1)
    assert point.memory_bytes[0] == pytest.approx(5 * shard + 80 * samples, abs=6)
    assert point.activation_memory_bytes[0] == 80 * samples
    assert point.source == ("measured" if tp in (1, 2, 8) and samples in (1, 4, 16) else "interpolated")


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 4))
def test_between_its_neighbours(samples, tp):
    profiles = metis_profiles()
    point = interpolate(profiles, ("A100-80", tp, samples))
    assert isinstance(point, Point)
    fastest, slowest = profiles.points["A100-80", 4, 1], profiles.points["A100-80", 1, 4]
    limits = zip(fastest.layer_ms[1:9], point.layer_ms[1:9], slowest.layer_ms[1:9], strict=True)
    assert all(low <= time <= high for low, time, high in limits)
    assert point.forward_backward_ms >= sum(point.layer_ms)  # as in every measured point


@pytest.mark.parametrize(
    ("key", "code"),
    [(("X", 1, 17), "microbatch"), (("X", 9, 1), "tp"), (("Y", 1, 1), "type"), (("X", 3, 32), "tp")],
)
def test_nothing_outside(key, code):
    gap = interpolate(power_law(), key)
    assert isinstance(gap, Gap) and gap.code == code and gap.key == key
    assert "there are X" in gap.reason if code == "type" else "tp 2: micro-batches 1 to 16" in gap.reason


def test_one_point_is_no_range():
    profiles = power_law(tps=(2,), sizes=(4,))
    assert isinstance(interpolate(profiles, ("X", 2, 4)), Point)
    for key in [("X", 2, 3), ("X", 2, 5), ("X", 1, 4), ("X", 4, 4)]:
        assert isinstance(interpolate(profiles, key), Gap)


def test_a_hole_at_a_degree_that_the_others_reach():
    points = {key: point for key, point in power_law().points.items() if key != ("X", 2, 16)}
    profiles = Profiles(power_law().model, points)
    point = interpolate(profiles, ("X", 2, 16))  # degree 2 ends at 4; 1 and 8 reach 16
    assert isinstance(point, Point) and point.layer_ms[0] == pytest.approx(3.0 * 16**0.9 * 2**-0.8)


def test_zero_has_no_logarithm():
    model = Model("m", (1,), (1,))
    points = {("X", 1, b): Point((0.0,), (1,), 0.0 if b == 1 else 2.0, 0.0) for b in (1, 4)}
    point = interpolate(Profiles(model, points), ("X", 1, 2))
    assert isinstance(point, Point) and point.layer_ms == (0.0,)
    assert point.forward_backward_ms == pytest.approx(1.0) and math.isfinite(point.optimizer_ms)


def test_between_modelled_points_is_modelled():
    points = {
        ("X", 1, b): Point((1.0 * b,), (1,), 1.0 * b, 1.0, source=source)
        for b, source in [(1, "measured"), (4, "modelled")]
    }
    point = interpolate(Profiles(Model("m", (1,), (1,)), points), ("X", 1, 2))
    assert isinstance(point, Point) and point.source == "modelled"


def test_public_profiles_leave_one_out():
    """A block's measured time at 4 samples from those at 2 and 8: within 10 %."""
    profiles, _ = profile_files.read(shared_profiles(), "GPT-Neo-2.7")
    for device_type in ("A100-40", "GH-96"):
        for tp in (1, 2, 4):
            key = (device_type, tp, 4)
            rest = Profiles(profiles.model, {k: p for k, p in profiles.points.items() if k != key})
            point = interpolate(rest, key)
            assert isinstance(point, Point)
            assert point.layer_ms[5] == pytest.approx(profiles.points[key].layer_ms[5], rel=0.1)
            memory = profiles.points[key].memory_bytes
            assert all(b - 2 <= a <= b + 2048 for a, b in zip(point.memory_bytes, memory, strict=True))
