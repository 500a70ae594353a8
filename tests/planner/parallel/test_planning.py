"""From profiles to a plan: the library's way, and the command's."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from triton_ext.cli import app
from triton_ext.errors import PlanningError
from triton_ext.planner import cluster_file, presets
from triton_ext.planner.parallel import plan_file, planning, profile_files, report, uniform
from triton_ext.planner.parallel.plan import Settings
from triton_ext.planner.parallel.planning import Options
from triton_ext.planner.parallel.profiles import Profiles

EXAMPLES = Path(__file__).parents[3] / "examples" / "planner"
METIS = Options("metis", "metis", time_limit_s=30.0)


@pytest.fixture(scope="module")
def profiles():
    return profile_files.read(EXAMPLES / "profiles")[0]


CLUSTER = cluster_file.load(EXAMPLES / "cluster.yaml")
SMALL = presets.cluster({"A100-40": 2, "V100-16": 2}, devices_per_node=2)


def invoke(*arguments):
    result = CliRunner().invoke(app, ["plan", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_uniform_plans_are_all_that_there_are():
    """Of 4 devices: (1 stage: dp, tp = 4,1 2,2 1,4), (2: 2,1 1,2), (4: 1,1), each with the micro-batches that dp
    divides. A replica of 4 lies in two nodes."""
    found = list(uniform.uniform_plans(SMALL, 6, 4, uniform.Allowed(anywhere=True)))
    inside = [plan for plan in found if plan.stages[0].tp < 4]
    assert list(uniform.uniform_plans(SMALL, 6, 4)) == inside and len(inside) < len(found)
    allowed = uniform.Allowed("gpipe", (Settings(), Settings(recompute_activations=True)), degrees=(2,))
    pairs = list(uniform.uniform_plans(SMALL, 6, 4, allowed))
    assert {plan.stages[0].tp for plan in pairs} == {2} and {plan.schedule for plan in pairs} == {"gpipe"}
    assert {plan.settings for plan in pairs} == set(allowed.settings)
    shapes = [(len(p.stages), p.stages[0].dp, p.stages[0].tp, p.microbatch_samples) for p in found]
    assert sorted(shapes) == sorted(
        [(1, 1, 4, 1), (1, 1, 4, 2), (1, 1, 4, 4), (1, 2, 2, 2), (1, 2, 2, 4), (1, 4, 1, 4),
         (2, 1, 2, 1), (2, 1, 2, 2), (2, 1, 2, 4), (2, 2, 1, 2), (2, 2, 1, 4), (4, 1, 1, 1), (4, 1, 1, 2), (4, 1, 1, 4)]
    )  # fmt: skip
    four = next(p for p in found if len(p.stages) == 4)
    assert [stage.end - stage.begin for stage in four.stages] == [2, 2, 1, 1]
    assert not [p for p in uniform.uniform_plans(SMALL, 3, 4) if len(p.stages) == 4]


@pytest.mark.parametrize("cost", planning.METHODS)
def test_uniform_planning_is_no_better_than_all_its_plans(profiles, cost):
    evaluator = planning.evaluator(profiles, Options("ours", cost))
    best = uniform.best_uniform(profiles, SMALL, 16, evaluator)
    costs = []
    for plan in uniform.uniform_plans(SMALL, profiles.model.layers, 16):
        try:
            costs.append(evaluator.cost(plan, SMALL).cost.total_ms)
            assert evaluator.bound_ms(plan, SMALL) <= costs[-1]
        except PlanningError as error:
            assert "GiB" in str(error) or "profiled range" in str(error)
    assert best.cost.total_ms == min(costs) and len(costs) > 3
    slowest = uniform.best_as_if_slowest(profiles, SMALL, 16, evaluator)
    assert slowest is None or slowest.cost.total_ms >= best.cost.total_ms


def test_no_uniform_plan_fits(profiles):
    tiny = dataclasses.replace(presets.device_type("V100-16"), memory_bytes=1 << 30)
    cluster = dataclasses.replace(presets.cluster({"V100-16": 2}), device_types=(tiny,))
    evaluator = planning.evaluator(profiles, METIS)
    assert uniform.best_uniform(profiles, cluster, 4, evaluator) is None
    assert uniform.best_as_if_slowest(profiles, cluster, 4, evaluator) is None


def test_both_costs_of_one_plan_are_close(profiles):
    """Two models of the same step: the simulator is nearer to ours."""
    result = planning.search(profiles, SMALL, 16, METIS)
    found = planning.simulated(result.best, SMALL, profiles)
    ours = planning.evaluator(profiles, Options()).cost(result.best.plan, SMALL).cost.total_ms
    assert ours == pytest.approx(found.simulated_ms, rel=0.05)
    assert result.best.cost.total_ms == pytest.approx(found.simulated_ms, rel=0.3)


def test_points_that_nobody_measured(profiles):
    """Without tp 4 and without V100: refused as they are, taken from the roofline where that is allowed, and said."""
    points = {key: point for key, point in profiles.points.items() if key[0] == "A100-40" and key[1] < 4}
    partial = Profiles(profiles.model, {k: dataclasses.replace(p, source="measured") for k, p in points.items()})
    nothing = planning.search(partial, SMALL, 16, METIS)
    assert nothing.best is None and {reason.code for reason in nothing.rejected} >= {"profile-type"}
    modelled = planning.search(partial, SMALL, 16, dataclasses.replace(METIS, model_missing=True))
    assert any("V100-16" in point for point in modelled.best.modelled)
    assert planning.simulated(modelled.best, SMALL, partial).simulated_ms > 0
    plan = modelled.best.plan
    with pytest.raises(PlanningError, match="V100-16"):
        planning.evaluator(partial, Options()).cost(plan, SMALL)
    found = planning.evaluator(partial, Options(model_missing=True)).cost(plan, SMALL)
    assert any("V100-16" in point for point in found.modelled)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algorithm": "best"}, "algorithm 'best'; there are ours, metis"),
        ({"algorithm": "metis"}, "the algorithm metis minimises the cost metis only"),
        ({"schedule": "interleaved"}, "schedule interleaved, 1 chunks"),
        ({"chunks": 2}, "schedule 1f1b, 2 chunks"),
        ({"allowed": ("all",)}, "allowed 'all'; there are recompute, shard-optimizer"),
        ({"algorithm": "metis", "cost": "metis", "schedule": "gpipe"}, "of the schedule 1f1b only"),
        ({"algorithm": "metis", "cost": "metis", "allow_unused": True}, "uses all devices"),
        ({"algorithm": "metis", "cost": "metis", "allowed": ("recompute",)}, "has no further settings"),
    ],
)
def test_options_that_cannot_be(options, message):
    with pytest.raises(PlanningError, match=message):
        Options(**options)


def test_devices_that_would_slow_a_plan_down_may_be_left_out(profiles):
    """One V100 beside two A100, linked by 10 Mbit/s: with it, every step takes longer."""
    far = presets.cluster({"A100-40": 2, "V100-16": 1})
    links = tuple(dataclasses.replace(link, bandwidth_bytes_per_s=1.25e6) for link in far.links)
    cluster = dataclasses.replace(far, links=links)
    every = planning.search(profiles, cluster, 8, Options())
    fewer = planning.search(profiles, cluster, 8, Options(allow_unused=True))
    assert fewer.best.cost.total_ms < every.best.cost.total_ms
    assert report.unused(every.best.plan, cluster) is None
    assert report.unused(fewer.best.plan, cluster) == "left unused: 1 V100-16 (device 2)"


def test_what_is_allowed_is_tried_with_and_without():
    tried = Options(allowed=("recompute", "shard-optimizer")).plan_settings()
    assert tried[0] == Settings() and len(set(tried)) == 4
    assert Settings(recompute_activations=True, shard_optimizer=True) in tried


def test_our_search_is_no_worse_than_metis(profiles):
    """Under our cost; and its best plan's cost is what the evaluator says."""
    ours = planning.search(profiles, SMALL, 16, Options())
    metis = planning.search(profiles, SMALL, 16, METIS)
    evaluator = planning.evaluator(profiles, Options())
    assert ours.best.cost.total_ms <= evaluator.cost(metis.best.plan, SMALL).cost.total_ms * (1 + 1e-9)
    assert ours.best.cost.total_ms == pytest.approx(evaluator.cost(ours.best.plan, SMALL).cost.total_ms)


def test_an_interleaved_plan(profiles):
    found = planning.search(profiles, SMALL, 16, Options(schedule="interleaved", chunks=2, time_limit_s=20.0))
    assert found.best.plan.schedule == "interleaved" and found.best.plan.settings.chunks_per_stage == 2


def test_our_search_under_the_published_cost(profiles):
    """It finds no worse plan than the published search does."""
    ours = planning.search(profiles, SMALL, 16, Options("ours", "metis"))
    metis = planning.search(profiles, SMALL, 16, METIS)
    assert ours.proven and ours.best.cost.total_ms <= metis.best.cost.total_ms * (1 + 1e-9)


def test_progress_is_told(profiles):
    told = []
    planning.search(profiles, SMALL, 8, Options(), told.append)
    assert told and all(0 <= each.done <= each.total for each in told)


def test_a_model_that_only_fits_with_recomputation(profiles):
    """The memory between what plans need at least without it and with it."""

    def with_memory(gib):
        kinds = tuple(dataclasses.replace(kind, memory_bytes=int(gib * (1 << 30))) for kind in SMALL.device_types)
        return dataclasses.replace(SMALL, device_types=kinds)

    plain, recompute = Options(), Options(allowed=("recompute",))
    for gib in (24, 20, 16, 14, 12, 10, 9, 8, 7, 6):
        cluster = with_memory(gib)
        if planning.search(profiles, cluster, 16, plain).best is None:
            found = planning.search(profiles, cluster, 16, recompute)
            assert found.best is not None and found.best.plan.settings.recompute_activations
            return
    raise AssertionError("every amount of memory sufficed")


def test_command(tmp_path, profiles):
    """The example, whole: report, plan file and picture."""
    code, output = invoke(
        EXAMPLES / "profiles", "--cluster", EXAMPLES / "cluster.yaml", "--batch", 64, "--algorithm", "metis",
        "-o", tmp_path / "plan.json", "--png", tmp_path / "plan.png", "--top", 2,
    )  # fmt: skip
    assert code == 0, output
    assert "example-gpt: 26 layers, batch 64, on 16 devices (8 A100-40, 8 V100-16) on 4 nodes" in output
    for title in ("Best plans", "Stages of the best plan", "Memory of the best plan", "Against simpler planning"):
        assert title in output
    assert "modelled, not measured: " in output and "What cannot be" in output
    file = plan_file.load(tmp_path / "plan.json")
    file.check(plan_file.inputs(profiles, CLUSTER, 64, METIS.record()))
    assert file.model == "example-gpt" and file.cost_ms > 0 and file.simulated_ms > 0
    assert (tmp_path / "plan.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(PlanningError, match="global_batch: 64, now 128"):
        file.check(plan_file.inputs(profiles, CLUSTER, 128, METIS.record()))


def test_command_says_why_there_is_no_plan(tmp_path):
    code, output = invoke(EXAMPLES / "profiles", "--cluster", "V100-16=1", "--batch", 4, "-o", tmp_path / "plan.json")
    assert code == 2 and "no plan: " in output and "memory" in output and "hint: " in output
    assert not (tmp_path / "plan.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("none", "--cluster", "V100-16=1", "--batch", 4), "none: no such folder of profiles"),
        ((EXAMPLES / "profiles", "--cluster", "none.yaml", "--batch", 4), "none.yaml: it cannot be read"),
        ((EXAMPLES / "profiles", "--cluster", "V100-16=b", "--batch", 4), "'V100-16=b': write devices as TYPE=COUNT"),
        ((EXAMPLES / "profiles", "--cluster", "V100-16=1,V100-16=2", "--batch", 4), "V100-16 is there twice"),
        ((EXAMPLES / "profiles", "--cluster", "A1=1", "--batch", 4), "no published device 'A1'"),
        ((EXAMPLES / "profiles", "--cluster", "V100-16=1", "--batch", 4, "--algorithm", "metis", "--cost", "ours"),
         "minimises the cost metis only"),
        ((EXAMPLES / "profiles", "--cluster", "V100-16=1", "--batch", 4, "--time-limit", 0), "time_limit_s is 0"),
    ],
)  # fmt: skip
def test_command_refuses(arguments, message):
    code, output = invoke(*arguments)
    assert code == 1 and message in output


def test_a_plan_that_cannot_be_written(tmp_path):
    code, output = invoke(EXAMPLES / "profiles", "--cluster", "A100-40=2", "--batch", 4, "--algorithm", "metis",
                          "-o", tmp_path / "none" / "plan.json")  # fmt: skip
    assert code == 1 and "the plan cannot be written" in output


def test_profiles_that_do_not_say_what_layers_hand_on(tmp_path):
    for path in (EXAMPLES / "profiles").glob("DeviceType.A100-40_tp1_*.json"):
        data = json.loads(path.read_text())
        del data["model"]["parameters"]["activation_parameters_bytes"]
        (tmp_path / path.name).write_text(json.dumps(data))
    arguments = (tmp_path, "--cluster", "A100-40=2", "--batch", 4, "--algorithm", "metis")
    code, output = invoke(*arguments)
    assert code == 1 and "give activation_bytes" in output
    assert invoke(*arguments, "--activation-bytes", 8388608)[0] == 0


def test_the_examples_profiles_are_what_the_script_writes(tmp_path):
    shutil.copy(EXAMPLES / "make_profiles.py", tmp_path)
    done = subprocess.run([sys.executable, tmp_path / "make_profiles.py"], capture_output=True, text=True, timeout=60,
                          check=True)  # fmt: skip
    assert done.stdout.startswith("24 files in ")
    written = {path.name: json.loads(path.read_text()) for path in (tmp_path / "profiles").iterdir()}
    assert written == {path.name: json.loads(path.read_text()) for path in (EXAMPLES / "profiles").iterdir()}


def test_the_command_starts_without_what_is_slow_to_load():
    code = (
        "import sys; from typer.testing import CliRunner; from triton_ext.cli import app\n"
        "assert CliRunner().invoke(app, ['plan', '--help']).exit_code == 0\n"
        "print(sorted({'torch', 'triton', 'matplotlib', 'scipy'} & set(sys.modules)))"
    )
    environment = {**os.environ, "COLUMNS": "120"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, env=environment
    )
    assert done.stdout.strip() == "[]"
