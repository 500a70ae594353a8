"""Points that nobody measured: scaled from measured ones where there are any, and said to be modelled."""

import math
from dataclasses import replace

import pytest

from metis_table import metis_profiles, shared_profiles
from triton_ext.errors import PlanningError
from triton_ext.planner import presets
from triton_ext.planner.cluster import DeviceType
from triton_ext.planner.parallel import profile_files
from triton_ext.planner.parallel.profiles import Gap, Model, Point, Profiles
from triton_ext.planner.parallel.roofline import add_modelled, modelled, transformer_work

TYPES = presets.DEVICE_TYPES
A, H = "A100-80", "H100-80"


def test_scaled_by_peak_and_bandwidth():
    base = metis_profiles().points[A, 2, 4]
    weak = DeviceType("weak", 80 << 30, TYPES[A].peak_flop_per_s / 10, TYPES[A].memory_bandwidth_bytes_per_s / 2)
    point = modelled(metis_profiles(), {A: TYPES[A], "weak": weak}, ("weak", 2, 4))
    assert isinstance(point, Point) and point.source == "modelled"
    # Blocks are limited by arithmetic, the embedding and the optimizer by memory.
    assert point.layer_ms[5] == pytest.approx(base.layer_ms[5] * 10)
    assert point.layer_ms[0] == pytest.approx(base.layer_ms[0] * 2)
    assert point.optimizer_ms == pytest.approx(base.optimizer_ms * 2)
    assert point.memory_bytes == base.memory_bytes
    assert point.forward_backward_ms > sum(point.layer_ms)


def test_its_own_type_and_degree_come_first():
    profiles = metis_profiles(slower={"T4": 3.0})
    point = modelled(profiles, TYPES, (A, 2, 8))
    assert isinstance(point, Point)
    assert point.layer_ms[5] == pytest.approx(2 * profiles.points[A, 2, 4].layer_ms[5])
    assert point.memory_bytes[5] == profiles.points[A, 2, 4].memory_bytes[5]  # says nothing about activations
    eight = modelled(profiles, TYPES, (A, 8, 1))
    assert isinstance(eight, Point)
    # Half the arithmetic; what is replicated is read and written as before.
    assert 0.5 <= eight.layer_ms[5] / profiles.points[A, 4, 1].layer_ms[5] < 0.85
    assert eight.parameter_bytes[5] == math.ceil(202_383_360 / 8)


def test_modelled_points_are_no_base():
    profiles = add_modelled(metis_profiles(), TYPES, [(A, 1, 8)])
    assert modelled(profiles, TYPES, (A, 1, 16)) == modelled(metis_profiles(), TYPES, (A, 1, 16))
    assert {key for key in profiles.points} - set(metis_profiles().points) == {(A, 1, 8)}


def test_without_any_measured_point():
    model = metis_profiles().model
    points = {key: modelled(Profiles(model), TYPES, key) for key in [(A, 1, 1), (A, 1, 4), (A, 4, 4), ("T4", 1, 1)]}
    assert all(isinstance(point, Point) and point.source == "modelled" for point in points.values())
    one, four, split, slow = points.values()
    assert sum(four.layer_ms) == pytest.approx(4 * sum(one.layer_ms), rel=0.1)
    assert sum(split.layer_ms) == pytest.approx(sum(four.layer_ms) / 4, rel=0.2)
    assert sum(slow.layer_ms) > 4 * sum(one.layer_ms)
    assert all(a < b for a, b in zip(one.memory_bytes, four.memory_bytes, strict=True))
    # The published figures are of float32 without matrix units: 16 times less than the peak for 16-bit numbers.
    measured = metis_profiles().points[A, 1, 4]
    assert 1 / 16 < four.layer_ms[5] / measured.layer_ms[5] < 1
    assert 1 / 3 < sum(four.memory_bytes) / sum(measured.memory_bytes) < 3


def test_activations_scale_with_the_samples_and_the_rest_does_not():
    profiles = metis_profiles()
    points = {
        key: replace(point, activation_memory_bytes=(1000,) * 10)
        for key, point in profiles.points.items()
        if key[2] == 1
    }
    point = modelled(Profiles(profiles.model, points), TYPES, (A, 1, 8))
    assert isinstance(point, Point)
    base = points[A, 1, 1]
    assert point.memory_bytes == tuple(size + 7000 for size in base.memory_bytes)
    assert point.activation_memory_bytes == (8000,) * 10


def test_types_without_figures():
    gap = modelled(metis_profiles(), {}, (H, 1, 1))
    assert isinstance(gap, Gap) and gap.code == "type" and H in gap.reason
    with pytest.raises(PlanningError, match="no figures of device type H100-80; there are T4"):
        add_modelled(metis_profiles(), {"T4": TYPES["T4"]}, [(H, 1, 1)])
    with pytest.raises(PlanningError, match="2 layers; a transformer has"):
        transformer_work(Model("m", (1, 1), (1, 1)))


def test_work_of_a_block():
    """A block of 12 h^2 parameters: 72 s h^2 for products and 12 s^2 h for attention, forward and backward."""
    hidden, tokens = 1024, 512
    model = Model("m", (4096, 4 * 12 * hidden**2, 4096), (4 * tokens * hidden,) * 3)
    assert transformer_work(model).flop[1] == pytest.approx(72 * tokens * hidden**2 + 12 * tokens**2 * hidden)
    assert transformer_work(model, hidden_size=hidden) == transformer_work(model)


@pytest.mark.parametrize("model", ["OPT-350", "GPT-Neo-2.7"])
def test_public_profiles_of_one_type_from_another(model):
    """How far it is off: each pair of types within a factor of 2.6, half of the pairs within 1.6."""
    profiles, _ = profile_files.read(shared_profiles(), model)
    factors = []
    for target in profiles.device_types:
        for reference in profiles.device_types:
            if target != reference:
                known = {key: point for key, point in profiles.points.items() if key[0] == reference}
                point = modelled(Profiles(profiles.model, known), TYPES, (target, 2, 2))
                assert isinstance(point, Point)
                ratio = sum(point.layer_ms) / sum(profiles.points[target, 2, 2].layer_ms)
                factors.append(max(ratio, 1 / ratio))
    assert max(factors) < 2.6 and sorted(factors)[len(factors) // 2] < 1.6
