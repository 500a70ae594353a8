"""Plans executed by processes: the same gradients as one process computes, and nothing left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest
from test_training_layout import plan
from typer.testing import CliRunner

from triton_ext.cli import app
from triton_ext.emulate import processes
from triton_ext.errors import PlanningError
from triton_ext.planner import cluster_file
from triton_ext.planner.parallel import plan_file
from triton_ext.training import quota
from triton_ext.training.launch import Job, run

SMALL = {"width": 32, "blocks": 4, "heads": 4, "sequence": 16, "vocabulary": 64}

TWO_RANKS = {
    "uneven replicas": plan((6, [([0], 3), ([1], 1)]), microbatches=2),
    "uneven stages": plan((1, [([1], 4)]), (5, [([0], 4)]), microbatches=2),
}
FOUR_RANKS = {
    "tensor parallel, in another order": plan((6, [([2, 0], 2)])),
    "a replica without samples": plan((6, [([0], 1), ([1], 2), ([2], 1), ([3], 0)])),
    "gpipe, four uneven stages": plan(
        (1, [([2], 2)]), (2, [([0], 2)]), (1, [([3], 2)]), (2, [([1], 2)]), schedule="gpipe"
    ),
    "uneven replicas, then tensor parallel": plan((3, [([0], 3), ([1], 1)]), (3, [([2, 3], 4)])),
    "tensor parallel, then uneven replicas": plan((3, [([0, 1], 4)]), (3, [([2], 1), ([3], 3)])),
    "one device, then three": plan((2, [([3], 5)]), (4, [([0], 1), ([1], 1), ([2], 3)])),
    "all three kinds": plan((2, [([0], 2), ([1], 2)]), (4, [([2, 3], 4)]), schedule="gpipe"),
    "two by two replicas": plan((4, [([0], 3), ([1], 1)]), (2, [([2], 2), ([3], 2)])),
    "interleaved": plan(
        (3, [([0], 1), ([2], 1)]), (3, [([1], 1), ([3], 1)]), schedule="interleaved", chunks_per_stage=2
    ),
    "tensor parallel replicas, one without samples": plan((6, [([2, 0], 2), ([3, 1], 0)])),
    "recomputed": plan((3, [([0], 2)]), (3, [([1], 2)]), recompute_activations=True),
}


def execute(plans, **options):
    job = Job(tuple(plans.values()), arguments=SMALL, learning_rate=1e-2, check=True, **options)
    return dict(zip(plans, run(job, timeout_s=120), strict=True))


def check(measured, plans):
    for name in plans:
        assert measured[name].loss_difference < 1e-5, name
        assert measured[name].gradient_difference < 1e-5, name
        assert len(measured[name].steps_s) == 3 and min(measured[name].steps_s) > 0


def remaining(starter=None):
    """Processes that runs of this process, or of another one, have started and that are still there."""
    entry = f"{processes.MARKER}=training-{starter or os.getpid()}-".encode()
    return [path for path in Path("/proc").glob("[0-9]*/environ") if entry in environment(path)]


def environment(path):
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_two_ranks_compute_what_one_process_computes():
    lines = []
    job = Job(tuple(TWO_RANKS.values()), arguments=SMALL, steps=3, warmup=0, learning_rate=1e-2, check=True)
    measured = dict(zip(TWO_RANKS, run(job, timeout_s=120, report=lines.append), strict=True))
    check(measured, TWO_RANKS)
    # The same steps of the same model, whatever the plan.
    assert measured["uneven replicas"].losses == pytest.approx(measured["uneven stages"].losses, rel=1e-3)
    assert len(lines) == 6 and lines[0].startswith("plan 0, step 1: loss ")
    assert not remaining()


@pytest.mark.slow
def test_four_ranks_compute_what_one_process_computes():
    measured = execute(FOUR_RANKS, steps=3)
    check(measured, FOUR_RANKS)


def random_plan(random):
    """Up to four devices in stages of random degrees, with random shares of the samples."""
    devices = random.sample(range(4), random.randint(1, 4))
    stages, samples = [], random.randint(1, 5)
    while devices:
        taken, devices = devices[: (count := random.randint(1, len(devices)))], devices[count:]
        tp = random.choice([degree for degree in (1, 2, 4) if count % degree == 0])
        cuts = sorted(random.randint(0, samples) for _ in range(count // tp - 1))
        shares = [b - a for a, b in zip([0, *cuts], [*cuts, samples], strict=True)]
        stages.append([(taken[i * tp : (i + 1) * tp], share) for i, share in enumerate(shares)])
    cuts = sorted(random.sample(range(1, 6), len(stages) - 1))
    layers = [b - a for a, b in zip([0, *cuts], [*cuts, 6], strict=True)]
    schedule = random.choice(["1f1b", "gpipe"])
    microbatches = random.randint(len(stages) if schedule == "1f1b" else 1, 5)
    return plan(*zip(layers, stages, strict=True), microbatches=microbatches, schedule=schedule)


@pytest.mark.slow
def test_random_plans_compute_what_one_process_computes():
    random = Random(11)
    plans = {f"{number}: {found}": found for number in range(16) for found in [random_plan(random)]}
    check(execute(plans, steps=3, warmup=0), plans)


@pytest.mark.slow
def test_the_loss_falls_with_quotas_and_the_slow_rank_takes_longer():
    plans = {"fast": plan((6, [([0], 2)])), "slow": plan((6, [([1], 2)]))}
    measured = execute(plans, steps=25, cpu_quotas=(0.6, 0.15))
    for name in plans:
        assert measured[name].losses[-1] < measured[name].losses[0] - 0.3
    assert measured["slow"].median_s > 2 * measured["fast"].median_s


@pytest.mark.slow
def test_a_plan_for_another_model_is_refused_with_the_ranks_reason():
    with pytest.raises(PlanningError, match="a plan of 9 layers for a model of 6"):
        run(Job((plan((9, [([0], 1)])),), arguments=SMALL), timeout_s=60)
    assert not remaining()


def test_a_run_that_takes_too_long_is_ended():
    began = time.monotonic()
    with pytest.raises(PlanningError, match="had not ended after 1 s"):
        run(Job((plan((6, [([0], 1)])),), arguments=SMALL, steps=100_000), timeout_s=1)
    assert time.monotonic() - began < 30
    assert not remaining()


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_others():
    killed = []

    def kill_a_rank(line):
        workers = [p for p in remaining() if b"triton_ext.training.worker" in (p.parent / "cmdline").read_bytes()]
        ranks = [p for p in workers if b"RANK=1" in environment(p).split(b"\0")]
        if "step 2" in line and ranks:
            os.kill(int(ranks[0].parent.name), signal.SIGKILL)
            killed.append(line)

    job = Job((TWO_RANKS["uneven stages"],), arguments=SMALL, steps=100_000)
    with pytest.raises(PlanningError, match="SIGKILL"):
        run(job, timeout_s=100, report=kill_a_rank)
    assert killed and not remaining()


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (Job(()), "no plan"),
        (Job((plan((6, [([0], 1)])),), steps=0), "0 steps"),
        (Job((plan((6, [([3], 1)])),), cpu_quotas=(0.5, 0.5)), "2 CPU quotas, and a plan that uses device 3"),
        (Job((plan((6, [([0], 1)]), shard_optimizer=True),)), "shard_optimizer"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_starts(job, message):
    with pytest.raises(PlanningError, match=message):
        run(job)


def saved(found, path):
    made_from = plan_file.Inputs("test", "0" * 64, "0" * 64, found.global_batch, {})
    plan_file.dump(plan_file.PlanFile(found, "transformer", made_from, 100.0, 110.0), path)
    return path


@pytest.mark.slow
def test_the_command_prints_measured_and_predicted_times(tmp_path):
    path = saved(TWO_RANKS["uneven stages"], tmp_path / "plan.json")
    arguments = [f"{name}={value}" for name, value in SMALL.items()]
    options = ["--steps", "3", "--check", "--cpu-quota", "0.5,0.3"]
    result = CliRunner().invoke(app, ["run", str(path), *options, "--", *arguments])
    assert result.exit_code == 0, result.output
    assert "step 3: loss" in result.output
    assert "median step" in result.output and "predicted by simulation: 110.0 ms" in result.output
    assert "against a single process" in result.output


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_command_leaves_nothing(tmp_path, number):
    path = saved(TWO_RANKS["uneven stages"], tmp_path / "plan.json")
    command = [
        sys.executable,
        "-c",
        "from triton_ext.cli import app; app()",
        "run",
        str(path),
        "--steps",
        "100000",
        "--cpu-quota",
        "0.5,0.5",
    ]
    command += ["--", *(f"{name}={value}" for name, value in SMALL.items())]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        for line in process.stdout:
            if "step 2" in line:
                break
        process.send_signal(number)
        process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode != 0
    assert not remaining(process.pid)
    assert not list(Path("/sys/fs/cgroup").glob(f"**/triton-ext-{process.pid}-*"))


def test_arguments_that_contradict_the_profiles_are_refused(tmp_path):
    path = saved(TWO_RANKS["uneven stages"], tmp_path / "plan.json")
    report = {"model": "triton_ext.training.transformer:transformer", "arguments": SMALL}
    (tmp_path / "profile.host.json").write_text(json.dumps(report))
    for given, message in ((["--", "width=64"], "not with {'width': 64}"), (["--model", "a.py:b"], "not of a.py:b")):
        result = CliRunner().invoke(app, ["run", str(path), "--profiles", str(tmp_path), *given])
        assert result.exit_code == 1 and message in result.output


def test_the_export_command(tmp_path):
    path = saved(TWO_RANKS["uneven stages"], tmp_path / "plan.json")
    result = CliRunner().invoke(app, ["export", str(path), "--to", "devicemesh"])
    assert result.exit_code == 0 and json.loads(result.output)["rank_devices"] == [1, 0]
    result = CliRunner().invoke(app, ["export", str(path), "--to", "megatron", "-o", str(tmp_path / "arguments")])
    assert result.exit_code == 0 and "--num-layers 4" in (tmp_path / "arguments").read_text()
    uneven = saved(TWO_RANKS["uneven replicas"], tmp_path / "uneven.json")
    result = CliRunner().invoke(app, ["export", str(uneven), "--to", "torchtitan"])
    assert result.exit_code == 1 and "3, 1 samples" in result.output


@pytest.mark.slow
def test_a_cluster_of_quotas_is_measured_and_read_again(tmp_path):
    path = tmp_path / "cluster.yaml"
    result = CliRunner().invoke(app, ["cpu-cluster", "0.5,0.15", "-o", str(path)])
    assert result.exit_code == 0, result.output
    found = cluster_file.load(path)
    assert quota.of_devices(found) == (0.5, 0.15)
    fast, slow = found.device_type("cpu-0.5"), found.device_type("cpu-0.15")
    assert fast.peak_flop_per_s > 1.8 * slow.peak_flop_per_s
    assert 1e6 < found.bandwidth_bytes_per_s(0, 1) < 1e11 and found.latency_s(0, 1) < 0.1
