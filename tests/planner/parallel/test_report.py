"""Plans in words, tables and pictures, from made-up figures."""

import dataclasses
import io
import struct
import sys

import pytest
from rich.console import Console

from triton_ext.errors import PlanningError
from triton_ext.planner import presets
from triton_ext.planner.parallel import gantt, report
from triton_ext.planner.parallel.pipeline import simulate
from triton_ext.planner.parallel.plan import ParallelPlan, Replica, Settings, Stage
from triton_ext.planner.parallel.profiles import Model, Point, Profiles
from triton_ext.planner.parallel.report import Simulated
from triton_ext.planner.parallel.result import Cost, CostedPlan, Rejected, SearchResult

LAYERS = 32
GIB = 1 << 30


def profiles(types=("A100-40", "V100-16")):
    model = Model("toy", (4_000_000,) * LAYERS, (1_000_000,) * LAYERS)
    points = {}
    for speed, name in enumerate(types, 1):
        for tp in (1, 2):
            for samples in (1, 2, 4):
                layer_ms, memory, kept = speed * samples / tp, (GIB // 4,) * LAYERS, (GIB // 16,) * LAYERS
                point = Point((layer_ms,) * LAYERS, memory, layer_ms * LAYERS, 5.0, activation_memory_bytes=kept)
                points[name, tp, samples] = point
    return Profiles(model, points)


def even(stages, dp=1, tp=1, microbatches=4, schedule="1f1b", chunks=1):
    """Stages of equal layers on the devices in order."""
    made, device = [], 0
    for number in range(stages):
        replicas = []
        for _ in range(dp):
            replicas.append(Replica(tuple(range(device, device + tp)), 1))
            device += tp
        made.append(Stage(number * LAYERS // stages, (number + 1) * LAYERS // stages, tuple(replicas)))
    return ParallelPlan(tuple(made), microbatches, microbatches * dp, schedule, Settings(chunks_per_stage=chunks))


def simulated(plan, cluster, total_ms=100.0, **unmeasured):
    costed = CostedPlan(plan, Cost(total_ms), (1.0,) * len(plan.stages), **unmeasured)
    return Simulated(costed, simulate(plan, cluster, profiles()))


def text(*renderables, width=160):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(*renderables)
    return console.export_text()


CLUSTER = presets.cluster({"A100-40": 4, "V100-16": 4})


def test_plans_with_both_costs():
    best = simulated(even(2, dp=2, tp=2), CLUSTER, 100.0, interpolated=("A100-40 tp 2 micro-batch 3",))
    shown = text(report.plans([best, simulated(even(8), CLUSTER, 2 * best.simulated_ms)], CLUSTER))
    assert f"{best.simulated_ms:.5g} ({best.simulated_ms / 100 - 1:+.1%})" in shown
    assert "16 layers on 4 A100-40, dp 2, tp 2" in shown and "16 layers on 4 V100-16, dp 2, tp 2" in shown
    assert "(with interpolated points)" in shown and "4 of 2" in shown
    assert "4|4|4|4 layers, each on 1 V100-16, dp 1, tp 1" in shown


def test_stages_and_memory():
    uneven = ParallelPlan(
        (
            Stage(0, 16, (Replica((0,), 3), Replica((1,), 1))),
            Stage(16, 32, tuple(Replica((d,), 1) for d in (4, 5, 6, 7))),
        ),
        4,
        16,
    )
    points = profiles()
    more = Profiles(points.model, points.points | {("A100-40", 1, 3): points.points["A100-40", 1, 4]})
    best = Simulated(CostedPlan(uneven, Cost(1.0), (1.0, 2.0)), simulate(uneven, CLUSTER, more))
    shown = text(report.stages(best, CLUSTER))
    assert "3 + 1" in shown and "4 of 1" in shown and "4 V100-16: 4-7" in shown and "0-15" in shown
    memory = text(report.memory(best, CLUSTER))
    # Parameters and two micro-batches in flight in the first stage, one in the second.
    assert ("5.0" in memory and "16 (31%)" in memory) or "16 (25%)" in memory
    assert memory.count("█") == sum(
        round(24 * best.step.peak_memory_bytes[d] / GIB / limit) for d, limit in ((0, 40), (4, 16))
    )
    assert report.unused(uneven, CLUSTER) == "left unused: 2 A100-40 (devices 2-3)"
    assert report.unused(even(8), CLUSTER) is None


@pytest.mark.parametrize(("share", "style", "filled"), [(0.5, "green", 12), (0.95, "yellow", 23), (1.2, "red", 24)])
def test_a_bar_says_how_full(share, style, filled):
    found = report.bar(share)
    assert found.plain == "█" * filled + "░" * (24 - filled) and found.spans[0].style == style


def test_layers_of_an_interleaved_stage():
    plan = even(4, microbatches=4, schedule="interleaved", chunks=2)
    assert [report.layers(plan, stage) for stage in (0, 3)] == ["layers 0-3, 16-19", "layers 12-15, 28-31"]
    assert report.layers(even(32), 5) == "layer 5"


COSTED = CostedPlan(even(8), Cost(100.0))


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (SearchResult("ours", (COSTED,), 7, lower_bound_ms=100.0), "optimum, proven (7 plans"),
        (SearchResult("ours", (COSTED,), 7, lower_bound_ms=80.0, complete=False,
                      timed_out=True),
         "at most 25.0% above the optimum: no plan costs less than 80 ms (7 plans costed in 0.00 s; stopped at the"),
        (SearchResult("metis", (COSTED,), 7), "best found; this algorithm proves nothing (7 plans"),
        (SearchResult("ours", (), 0), "no plan: every plan of the space was rejected"),
        (SearchResult("ours", (COSTED,), 7, lower_bound_ms=80.0, complete=False),
         "at most 25.0% above the optimum: no plan costs less than 80 ms (7 plans costed in 0.00 s; stopped at the "
         "limit of plans that are priced"),
        (SearchResult("ours", (COSTED,), 7, lower_bound_ms=0.0, complete=False, timed_out=True),
         "best found; how far from the optimum is not known (7 plans costed in 0.00 s; stopped at the time limit"),
        (SearchResult("ours", (), 0, complete=False, timed_out=True), "no plan: the time limit came first"),
        (SearchResult("ours", (), 0, complete=False), "no plan: none was found, but not all were tried"),
    ],
)  # fmt: skip
def test_how_good_the_best_plan_is_known_to_be(result, message):
    assert report.outcome(result).startswith(message)


def test_no_plan_is_not_a_plan_that_costs_nothing():
    free = SearchResult("ours", (dataclasses.replace(COSTED, cost=Cost(0.0)),), 1)
    assert "no plan" not in report.outcome(free)
    shown = text(report.speed_ups(COSTED, {"uniform": None, "slowest": dataclasses.replace(COSTED, cost=Cost(250.0))}))
    assert "no plan" in shown and "2.5" in shown
    assert "nan" in text(report.speed_ups(free.plans[0], {"other": COSTED}))


def test_reasons_are_counted_most_frequent_first():
    result = SearchResult(
        "ours", (), 0, (Rejected("memory", 3, "stage 0 is full"), Rejected("samples", 4000, "too few")), {"a rule": 12}
    )
    shown = text(report.rejected(result))
    assert shown.index("4,000") < shown.index("stage 0 is full") and "by rule: a rule 12" in shown
    assert text(report.rejected(SearchResult("ours", (), 0))).strip() == ""


def test_hints_follow_from_the_reasons():
    def hints(*codes, algorithm="ours", timed_out=False, **options):
        reasons = tuple(Rejected(code, 1, "") for code in codes)
        result = SearchResult(algorithm, (), 0, reasons, complete=not timed_out, timed_out=timed_out)
        return report.hints(result, **{"model_missing": False, "not_allowed": ("recompute",)} | options)

    assert hints("samples") == []
    assert hints("profile-tp") == ["hint: profile what is missing, or take it from a roofline with --modelled"]
    assert hints("profile", model_missing=True) == []
    assert hints("memory") == ["hint: less memory with --allow recompute"]
    assert hints("memory", not_allowed=()) == hints("memory", algorithm="metis") == []
    assert hints("samples", timed_out=True) == ["hint: a longer --time-limit"]


def test_what_was_not_measured():
    plan = dataclasses.replace(
        COSTED, interpolated=("A100-40 tp 1 micro-batch 3",), modelled=("P100-16 tp 1 micro-batch 1",)
    )
    lines = report.unmeasured(plan)
    assert lines[0].startswith("interpolated: A100-40 tp 1 micro-batch 3")
    assert lines[1].startswith("modelled, not measured: P100-16")
    assert report.unmeasured(COSTED) == ["every profile point that the best plan uses was measured"]


def size(path):
    """Width and height of a PNG."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", data[16:24])


@pytest.mark.parametrize("plan", [even(2, dp=2, tp=2), even(8), even(4, schedule="interleaved", chunks=2),
                                  even(4, dp=2, microbatches=60, schedule="gpipe")])  # fmt: skip
def test_a_picture_of_the_pipeline(tmp_path, plan):
    gantt.draw(plan, simulate(plan, CLUSTER, profiles()), CLUSTER, tmp_path / "g.png")
    width, height = size(tmp_path / "g.png")
    panels = 2 if plan.microbatches > 24 else 1
    assert width == 1430 and height > 110 * 0.5 * len(plan.stages) * panels


def test_bars_are_where_the_simulation_says():
    from matplotlib.figure import Figure

    plan = even(2, dp=2, tp=2)
    step = simulate(plan, CLUSTER, profiles())
    axes = Figure().add_subplot()
    gantt._panel(axes, step, [0, 4], 0.0, step.step_time_s * 1e3, 1.0)
    drawn = {
        (round(path.vertices[:, 0].min(), 3), round(path.vertices[:, 0].max(), 3))
        for bars in axes.collections
        for path in bars.get_paths()
    }
    for event in step.events:
        if event.device in (0, 4):
            assert (round(event.start_s * 1e3, 3), round(event.end_s * 1e3, 3)) in drawn
    sent = [s for s in step.sent if s.source_device in (0, 4)]
    assert sent and all((round(s.start_s * 1e3, 3), round(s.end_s * 1e3, 3)) in drawn for s in sent)


def test_a_picture_that_cannot_be_written(tmp_path):
    plan = even(2)
    with pytest.raises(PlanningError, match="the picture cannot be written"):
        gantt.draw(plan, simulate(plan, CLUSTER, profiles()), CLUSTER, tmp_path / "none" / "g.png")


def test_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(PlanningError, match=r"pip install 'triton-ext\[bench\]'"):
        gantt.draw(even(2), simulate(even(2), CLUSTER, profiles()), CLUSTER, tmp_path / "g.png")
