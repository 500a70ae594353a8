"""CPU quotas hold, are removed, and come from the names of device types."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from triton_ext.errors import PlanningError
from triton_ext.planner.cluster import Cluster, DeviceType, Fabric, Node
from triton_ext.training import quota


def slowdown(cpu_s=0.15):
    """How much longer than its computing time a computation takes."""
    began, computed = time.perf_counter(), time.process_time()
    while time.process_time() - computed < cpu_s:
        pass
    return (time.perf_counter() - began) / cpu_s


def test_a_process_with_a_quota_takes_its_time():
    with quota.quotas([0.25]) as limits:
        with quota.joined(limits.setting(0)):
            limited = slowdown()
        groups = limits.groups
    assert limited > 3.0  # 4, and more where the machine is busy
    assert not any(group.exists() for group in groups)


def test_a_duty_cycle_does_the_same_without_cgroups():
    with quota.joined("0.25:"):
        limited = slowdown()
    assert limited > 2.5


def test_no_setting_is_no_limit():
    with quota.joined(None):
        pass


def test_groups_are_removed_when_the_block_fails():
    with pytest.raises(ZeroDivisionError), quota.quotas([0.5, 0.5]) as limits:
        groups = limits.groups
        raise ZeroDivisionError
    assert not any(Path(group).exists() for group in groups)


def test_what_a_killed_process_left_is_removed(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left, mine, others = (tmp_path / f"triton-ext-{name}-1-0" for name in (ended.pid, os.getpid(), "hosts"))
    for group in (left, mine, others):
        group.mkdir()
    quota._remove_abandoned(tmp_path)
    assert not left.exists() and mine.exists() and others.exists()


@pytest.mark.parametrize("cores", [0.0, 0.01, -1.0, 1e6])
def test_a_quota_that_cannot_be_is_refused(cores):
    with pytest.raises(PlanningError, match=r"give 0\.1 to"), quota.quotas([cores]):
        pass


def cluster(*names):
    types = tuple(DeviceType(name, 1 << 30, 1e9, 1e9) for name in sorted(set(names)))
    return Cluster(types, (Node("host", names, Fabric(1e9, 1e-5)),))


def test_device_types_say_their_quotas():
    assert quota.of_devices(cluster("cpu-0.5", "cpu-0.25", "cpu-0.5")) == (0.5, 0.25, 0.5)
    assert quota.of_devices(cluster("A100-40")) is None


def test_a_device_type_without_a_quota_among_others_is_named():
    with pytest.raises(PlanningError, match="device type A100-40"):
        quota.of_devices(cluster("cpu-0.5", "A100-40"))
