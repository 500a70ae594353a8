"""Plan files: written and read again, what they refuse, and whether their inputs are still the same."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triton_ext.errors import PlanningError
from triton_ext.planner import presets
from triton_ext.planner.parallel import plan_file
from triton_ext.planner.parallel.plan import ParallelPlan, Replica, Settings, Stage
from triton_ext.planner.parallel.plan_file import PlanFile
from triton_ext.planner.parallel.profiles import Model, Point, Profiles

MODEL = Model("toy", (1000, 2000, 2000, 1000), (64, 64, 64, 64))
POINT = Point((1.0, 2.0, 2.0, 1.5), (10, 20, 20, 15), 6.5, 0.5)
PROFILES = Profiles(MODEL, {("A100-40", 1, 1): POINT, ("V100-16", 1, 1): dataclasses.replace(POINT, optimizer_ms=0.7)})
CLUSTER = presets.cluster({"A100-40": 2, "V100-16": 1})
PLAN = ParallelPlan((Stage(0, 3, (Replica((0,), 3), Replica((1,), 1))), Stage(3, 4, (Replica((2,), 4),))), 2, 8)
OPTIONS = {"algorithm": "ours", "time_limit_s": 2.5, "seed": None}
FILE = PlanFile(PLAN, "toy", plan_file.inputs(PROFILES, CLUSTER, 8, OPTIONS), 12.5, 13.0)


@st.composite
def plans(draw):
    microbatches, samples = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    stages, layer, device = [], 0, 0
    for _ in range(draw(st.integers(1, 5))):
        tp, dp = draw(st.integers(1, 3)), draw(st.integers(1, 3))
        cuts = sorted(draw(st.lists(st.integers(0, samples), min_size=dp - 1, max_size=dp - 1)))
        shares = [b - a for a, b in zip([0, *cuts], [*cuts, samples], strict=True)]
        replicas = []
        for share in shares:
            replicas.append(Replica(tuple(range(device, device + tp)), share))
            device += tp
        end = layer + draw(st.integers(1, 4))
        stages.append(Stage(layer, end, tuple(replicas)))
        layer = end
    settings = Settings(*draw(st.tuples(*[st.booleans()] * 4)), chunks_per_stage=draw(st.integers(1, 4)))
    schedule = draw(st.sampled_from(["1f1b", "gpipe", "interleaved"]))
    return ParallelPlan(tuple(stages), microbatches, microbatches * samples, schedule, settings)


@given(plans())
def test_written_and_read_again(tmp_path_factory, plan):
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    file = PlanFile(plan, "toy", plan_file.inputs(PROFILES, CLUSTER, plan.global_batch, OPTIONS), 0.0)
    plan_file.dump(file, path)
    assert plan_file.load(path) == file


def edited(path, *keys, value=None):
    """The file with a field replaced, or without it."""
    plan_file.dump(FILE, path)
    data = json.loads(path.read_text())
    inner = data
    for key in keys[:-1]:
        inner = inner[key]
    if value is None:
        del inner[keys[-1]]
    else:
        inner[keys[-1]] = value
    path.write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (("plan", "microbatches"), 0, r"p.json: plan.microbatches: 0: .*greater than or equal to 1"),
        (("plan", "microbatches"), 3, r"p.json: plan: a batch of 8 in 3 micro-batches"),
        (("plan", "microbatches"), "2", r"plan.microbatches: '2': .*valid integer"),
        (("plan", "global_batch"), 16, r"stage 0 computes 4 samples of a micro-batch, which has 8"),
        (("plan", "stages", 1, "begin"), 2, r"plan: stage 1 has layers 2 to 4; it must begin at 3"),
        (("plan", "stages", 0, "replicas", 1, "devices", 0), -1, r"plan.stages\[0\].replicas\[1\].devices\[0\]: -1"),
        (("plan", "stages", 0, "replicas", 1, "devices", 0), 2, r"stage 1 uses device 2, which the plan has used"),
        (("plan", "stages", 0, "tp"), 2, r"plan.stages\[0\].tp: no such field"),
        (("plan", "schedule"), "zb", r"plan.schedule: 'zb': input should be '1f1b', 'gpipe' or 'interleaved'"),
        (("plan", "stages"), None, r"plan.stages: missing"),
        (("predicted", "cost_ms"), -1.0, r"predicted.cost_ms: -1"),
        (("inputs", "cluster"), "x", r"inputs.cluster: 'x'"),
        (("inputs", "cluster"), "0" * 64, r"inputs.sha256 is not that of the inputs beside it"),
        (("inputs", "options", "algorithm"), "metis", r"inputs.sha256 is not that of the inputs beside it"),
        (("format",), 2, r"format: 2"),
    ],
)
def test_errors_name_the_field(tmp_path, keys, value, message):
    edited(tmp_path / "p.json", *keys, value=value)
    with pytest.raises(PlanningError, match=message):
        plan_file.load(tmp_path / "p.json")


def test_no_file_and_no_json(tmp_path):
    with pytest.raises(PlanningError, match=r"none.json: it cannot be read"):
        plan_file.load(tmp_path / "none.json")
    (tmp_path / "p.json").write_text("{")
    with pytest.raises(PlanningError, match=r"p.json: it cannot be read"):
        plan_file.load(tmp_path / "p.json")


def test_the_same_inputs_in_another_order():
    points = dict(reversed(PROFILES.points.items()))
    now = plan_file.inputs(Profiles(MODEL, points), CLUSTER, 8, dict(reversed(OPTIONS.items())))
    assert now.sha256 == FILE.inputs.sha256
    FILE.check(now)


@pytest.mark.parametrize(
    ("profiles", "cluster", "batch", "options", "message"),
    [
        (
            Profiles(MODEL, {**PROFILES.points, ("A100-40", 1, 1): dataclasses.replace(POINT, optimizer_ms=0.51)}),
            CLUSTER, 8, OPTIONS, r"other inputs: profiles: [0-9a-f]{12}…, now [0-9a-f]{12}…; plan again",
        ),
        (Profiles(MODEL, {("A100-40", 1, 1): POINT}), CLUSTER, 8, OPTIONS, "profiles: "),
        (Profiles(dataclasses.replace(MODEL, activation_bytes=(64, 64, 64, 65)), PROFILES.points), CLUSTER, 8, OPTIONS,
         "profiles: "),
        (PROFILES, presets.cluster({"A100-40": 2, "V100-16": 2}), 8, OPTIONS, "cluster: "),
        (PROFILES, presets.cluster({"A100-40": 2, "V100-16": 1}, network_latency_s=9e-6), 8, OPTIONS, "cluster: "),
        (PROFILES, CLUSTER, 16, OPTIONS, "global_batch: 8, now 16"),
        (PROFILES, CLUSTER, 8, {**OPTIONS, "algorithm": "metis"}, "option algorithm: ours, now metis"),
        (PROFILES, CLUSTER, 8, {**OPTIONS, "cost": "metis"}, "option cost: not given, now metis"),
    ],
)  # fmt: skip
def test_a_change_of_an_input_is_found(profiles, cluster, batch, options, message):
    now = plan_file.inputs(profiles, cluster, batch, options)
    assert now.sha256 != FILE.inputs.sha256
    with pytest.raises(PlanningError, match=message):
        FILE.check(now)


def test_another_version(monkeypatch):
    monkeypatch.setattr(plan_file.metadata, "version", lambda _: "9.9")
    now = plan_file.inputs(PROFILES, CLUSTER, 8, OPTIONS)
    assert [change.rpartition(", ")[2] for change in FILE.inputs.changes(now)] == ["now 9.9"]
