"""A job's priority and path class: from arguments or the environment, the same on all ranks or an error on all."""

import os

import pytest
import torch.distributed as dist

import triton_ext as tx
from distributed import harness
from triton_ext.errors import JobError

WORLD = 3
NAMES = ("TRITON_EXT_PRIORITY", "TRITON_EXT_PATH_CLASS")


# What ranks are told, by rank or for all, in the environment and as arguments of init().
TOLD = {
    "nothing": ({}, {}),
    "environment": ({"all": {"TRITON_EXT_PRIORITY": "3", "TRITON_EXT_PATH_CLASS": ""}}, {}),
    "both": ({"all": {"TRITON_EXT_PRIORITY": "3", "TRITON_EXT_PATH_CLASS": "12"}}, {"all": {"priority": 0}}),
    "priorities differ": ({}, {"all": {"priority": 1}, 2: {"priority": 4}}),
    "one has a class": ({1: {"TRITON_EXT_PATH_CLASS": "7"}}, {}),
    "no number": ({1: {"TRITON_EXT_PRIORITY": "high"}}, {}),
}


def _tell_all(rank, tell):
    """By case, the network class that init() returns, or the error's text."""
    results = {}
    for case, (environment, arguments) in TOLD.items():
        for name in NAMES:
            os.environ.pop(name, None)
        os.environ.update(environment.get(rank, environment.get("all", {})))
        try:
            tx.init(**arguments.get(rank, arguments.get("all", {})))
            told = tx.network_class()
            results[case] = told.priority, told.path_class
        except JobError as error:
            results[case] = str(error)
    return results


def test_all_ranks_agree_or_all_fail():
    for results in harness.run(WORLD, _tell_all):
        assert results["nothing"] == (None, None)
        assert results["environment"] == (3, None)
        assert results["both"] == (0, 12)
        assert "priority: 1 on rank 0 and 4 on rank 2" in results["priorities differ"]
        assert "path_class: None on rank 0 and 7 on rank 1" in results["one has a class"]
        assert results["no number"] == "TRITON_EXT_PRIORITY=high on rank 1: give a whole number from 0 to 63"


@pytest.fixture
def alone(monkeypatch):
    for name in (*NAMES, "RANK"):
        monkeypatch.delenv(name, raising=False)
    assert not dist.is_initialized()
    yield
    tx.shutdown()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"priority": 64}, "priority=64 on rank 0: give a whole number from 0 to 63"),
        ({"priority": -1}, "priority=-1"),
        ({"priority": True}, "priority=True"),
        ({"path_class": 1.5}, "path_class=1.5"),
        ({"path_class": 16384}, "path_class=16384 on rank 0: give a whole number from 0 to 16383"),
    ],
)
def test_impossible_values(alone, arguments, message):
    with pytest.raises(JobError, match=message):
        tx.init(**arguments)


def test_it_is_there_between_init_and_shutdown(alone):
    with pytest.raises(JobError, match=r"call tx\.init\(\) first"):
        tx.network_class()
    tx.init(priority=2, path_class=5)
    assert (tx.network_class().priority, tx.network_class().path_class) == (2, 5)
    tx.shutdown()
    with pytest.raises(JobError):
        tx.network_class()
