"""Profiles: what is measured is what there is, and a lack of memory is a point, not an end."""

import json

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from triton_ext.cli import app
from triton_ext.errors import PlanningError
from triton_ext.planner.parallel import profile_files
from triton_ext.training import profiler
from triton_ext.training.profile import ALONE, TOGETHER, Task, default_device_type, profile, write

TRANSFORMER = "triton_ext.training.transformer:transformer"
SMALL = {"width": 16, "blocks": 2, "heads": 2, "sequence": 8, "vocabulary": 32}


class Chain(nn.Module):
    """Layers that are given, from [samples, 64] to [samples, 64]."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def batch(self, samples, seed):
        return torch.zeros(samples, 64), torch.zeros(samples, 64)

    def loss(self, output, target):
        return (output - target).sum()


class Greedy(nn.Module):
    """A layer that cannot have more than two samples."""

    def forward(self, x):
        if len(x) > 2:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 80 bytes")
        return x * 2


class Broken(nn.Module):
    def __init__(self, message="shapes do not match"):
        super().__init__()
        self.message = message

    def forward(self, x):
        raise RuntimeError(self.message)


def measure(model, samples=(1,), **options):
    options = {"repeats": 1, "device": torch.device("cpu")} | options
    return profiler.measure({1: model}, samples, **options)


def test_a_profile_is_written_and_read_again(tmp_path):
    task = Task(TRANSFORMER, SMALL, degrees=(1, 2), samples=(1, 3), repeats=1)
    lines = []
    profiles, report = profile(task, "host", report=lines.append)
    assert sorted(profiles.points) == [("host", 1, 1), ("host", 1, 3), ("host", 2, 1), ("host", 2, 3)]
    write(profiles, report, tmp_path)
    again, _ = profile_files.read(tmp_path)
    assert again == profiles
    assert lines == ["repeat 1 of 1: 4 points"]
    recorded = json.loads((tmp_path / "profile.host.json").read_text())
    assert recorded["torch"] == torch.__version__ and recorded["threads"] == 1 and recorded["arguments"] == SMALL
    assert recorded["tensor_parallel"] == ALONE and len(recorded["sha256"]) == 64
    for entry in recorded["points"]:
        point = profiles.points["host", entry["tp"], entry["samples"]]
        both = [f + b for f, b in zip(entry["forward_ms"], entry["backward_ms"], strict=True)]
        assert both == pytest.approx(point.layer_ms)
        assert min(entry["forward_ms"] + entry["backward_ms"]) > 0


def test_memory_is_the_state_of_a_shard_and_the_kept_activations():
    profiles, _ = profile(Task(TRANSFORMER, SMALL, degrees=(1, 2), samples=(1, 2), repeats=1), "host")
    width, vocabulary, sequence = SMALL["width"], SMALL["vocabulary"], SMALL["sequence"]
    assert profiles.model.parameter_bytes[0] == 4 * (vocabulary + sequence) * width
    assert profiles.model.activation_bytes == (4 * sequence * width,) * 3 + (4 * sequence * vocabulary,)
    whole, shard = profiles.points["host", 1, 1], profiles.points["host", 2, 1]
    assert whole.parameter_bytes == profiles.model.parameter_bytes
    assert shard.parameter_bytes[0] == 4 * (vocabulary // 2 + sequence) * width  # positions are not shared
    for one, two, whole_bytes in zip(whole.memory_bytes, shard.memory_bytes, whole.parameter_bytes, strict=True):
        assert two < one and one > 4 * whole_bytes
    more = profiles.points["host", 1, 2]
    # Each sample adds the same.
    assert more.activation_memory_bytes[1] == 2 * whole.activation_memory_bytes[1]


def test_kept_activations_are_counted_once_and_parameters_not():
    outcome = measure(Chain(nn.Linear(64, 64), nn.Sigmoid()), samples=(5,))
    # A linear layer keeps its input; a sigmoid and the loss's difference keep the sigmoid's output, or nothing.
    assert outcome.measured[1, 5].point.activation_memory_bytes == (5 * 64 * 4, 5 * 64 * 4)


@pytest.mark.slow
def test_layers_share_the_time_as_they_compute():
    class Busy(nn.Module):
        def __init__(self, times):
            super().__init__()
            self.weight = nn.Parameter(torch.eye(64))
            self.times = times

        def forward(self, x):
            for _ in range(self.times):
                x = x @ self.weight
            return x

    for throttled in (False, True):
        outcome = measure(Chain(Busy(4), Busy(40)), samples=(64,), repeats=3, throttled=throttled)
        light, heavy = outcome.measured[1, 64].point.layer_ms
        assert 4 < heavy / light < 25


def test_out_of_memory_is_an_infeasible_point():
    outcome = measure(Chain(nn.Linear(64, 64), Greedy()), samples=(1, 2, 4))
    assert sorted(outcome.measured) == [(1, 1), (1, 2)]
    assert outcome.infeasible.keys() == {(1, 4)}
    assert "can't allocate memory" in outcome.infeasible[1, 4]


def test_memory_that_would_not_suffice_is_not_taken(monkeypatch):
    monkeypatch.setattr(profiler, "_available_bytes", lambda: 100_000)
    outcome = measure(Chain(nn.Linear(64, 64), nn.Sigmoid()), samples=(1, 1_000_000))
    assert sorted(outcome.measured) == [(1, 1)]
    assert "are available" in outcome.infeasible[1, 1_000_000]


def test_a_message_that_only_mentions_memory_is_no_lack_of_it():
    with pytest.raises(RuntimeError, match="illegal memory access"):
        measure(Chain(nn.Linear(64, 64), Broken("an illegal memory access was encountered")))


def test_any_other_error_of_a_model_is_the_users():
    with pytest.raises(RuntimeError, match="shapes do not match"):
        measure(Chain(nn.Linear(64, 64), Broken()))


def test_another_models_profiles_are_not_mixed_in(tmp_path):
    task = Task(TRANSFORMER, SMALL, samples=(1,), repeats=1)
    write(*profile(task, "host"), tmp_path)
    other = Task(TRANSFORMER, SMALL | {"width": 32}, samples=(1,), repeats=1)
    with pytest.raises(PlanningError, match="another folder"):
        write(*profile(other, "faster"), tmp_path)


def test_a_degree_that_does_not_divide_the_model_is_named():
    with pytest.raises(PlanningError, match="2 heads cannot be shared by 3"):
        profile(Task(TRANSFORMER, SMALL, degrees=(3,), samples=(1,)), "host")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"degrees": (0,)}, "degrees 0"),
        ({"samples": ()}, "none"),
        ({"samples": (1, 1)}, "samples 1, 1"),
        ({"repeats": 0}, "0 repeats"),
        ({"device": "cuda", "cpu_quota": 0.5}, "not for cuda"),
    ],
)
def test_what_cannot_be_measured_is_refused(wrong, message):
    with pytest.raises(PlanningError, match=message):
        Task(TRANSFORMER, SMALL, **wrong)


def test_the_command_writes_files_and_says_what_is_left_out(tmp_path):
    arguments = [f"{name}={value}" for name, value in SMALL.items()]
    options = ["--tp", "1,2", "--samples", "1,2", "--repeats", "1", "--device", "cpu", "-o", str(tmp_path)]
    result = CliRunner().invoke(app, ["profile", TRANSFORMER, *arguments, *options])
    assert result.exit_code == 0, result.output
    assert "without the group's communication" in result.output
    assert sorted(path.name for path in tmp_path.glob("DeviceType.*")) == [
        f"DeviceType.cpu_tp{tp}_bs{samples}.json" for tp in (1, 2) for samples in (1, 2)
    ]
    result = CliRunner().invoke(app, ["profile", TRANSFORMER, "--samples", "one", "-o", str(tmp_path)])
    assert result.exit_code == 1 and "--samples one: write it as numbers" in result.output


def test_names_of_devices_say_their_quota():
    assert default_device_type(Task(TRANSFORMER, cpu_quota=0.25)) == "cpu-0.25"
    assert default_device_type(Task(TRANSFORMER)) == "cpu"


@pytest.mark.slow
def test_a_degree_measured_by_a_group_of_processes_includes_its_communication():
    task = Task(TRANSFORMER, SMALL, degrees=(1, 2), samples=(1,), repeats=1, together=True, cpu_quota=0.4)
    profiles, report = profile(task, "host", timeout_s=120)
    assert report["tensor_parallel"] == TOGETHER and not report["infeasible"]
    assert profiles.points["host", 2, 1].layer_ms[1] > profiles.points["host", 1, 1].layer_ms[1]
