"""A simulated training step as a picture: one row for each stage, what it does and when."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import PlanningError
from ..cluster import Cluster
from .pipeline import ALL_REDUCE, BACKWARD, FORWARD, OPTIMIZER, Event, Step
from .plan import ParallelPlan
from .report import layers, milliseconds, stage_devices

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {FORWARD: "#4c78a8", BACKWARD: "#72b7b2", ALL_REDUCE: "#e45756", OPTIMIZER: "#54504c"}
_SENT = {True: "#f2a541", False: "#c9802b"}  # activations, gradients
_NAMES = {
    FORWARD: "forward",
    BACKWARD: "backward",
    ALL_REDUCE: "gradients' all-reduce",
    OPTIMIZER: "optimizer",
}
_WIDTH_IN, _DPI = 13.0, 110
_ROW_IN, _MARGIN_IN = 0.52, 1.25
_WHOLE_IN, _ZOOMED_IN = 10.8, 5.3  # of the panels, about
_MOST_MICROBATCHES = 24  # with more, their beginning and their end are drawn once more, larger
_LABEL_POINTS = (7.0, 6.0, 5.0)


def draw(plan: ParallelPlan, step: Step, cluster: Cluster, path: Path) -> None:
    """Write the timeline of a step as a PNG.

    A stage with several replicas is drawn as its slowest one. Below a stage's row is what it sends: activations to the
    next stage, gradients to the one before. With many micro-batches the step's beginning and end are drawn larger.
    Needs matplotlib.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        raise PlanningError("drawing needs matplotlib: pip install 'triton-ext[bench]'") from None
    if not step.step_time_s:
        raise PlanningError(f"{path}: a step that takes no time cannot be drawn; its profiles have no times")
    rows = [_slowest(step, stage.devices) for stage in plan.stages]
    stages = len(plan.stages)
    panel_in = _ROW_IN * stages
    zoomed = plan.microbatches > _MOST_MICROBATCHES
    height_in = panel_in * (2 if zoomed else 1) + _MARGIN_IN + (0.75 if zoomed else 0)
    figure = Figure(figsize=(_WIDTH_IN, height_in), dpi=_DPI, layout="constrained")
    grid = figure.add_gridspec(2 if zoomed else 1, 2 if zoomed else 1)
    whole = figure.add_subplot(grid[0, :])
    end_ms = step.step_time_s * 1e3
    panels = [(whole, 0.0, end_ms, _WHOLE_IN)]
    if zoomed:
        forward_ms = max(e.end_s - e.start_s for e in step.events if e.kind == FORWARD) * 1e3
        backward_ms = max(e.end_s - e.start_s for e in step.events if e.kind == BACKWARD) * 1e3
        window_ms = min((forward_ms + backward_ms) * (min(stages, 8) + 2), end_ms / 2)
        panels.append((figure.add_subplot(grid[1, 0]), 0.0, window_ms, _ZOOMED_IN))
        panels.append((figure.add_subplot(grid[1, 1]), end_ms - window_ms, end_ms, _ZOOMED_IN))
    for axes, begin_ms, until_ms, width_in in panels:
        _panel(axes, step, rows, begin_ms, until_ms, width_in * 72 / (until_ms - begin_ms))
    labels = [
        f"stage {number}: {layers(plan, number)}, {step.compute_s[row] / step.step_time_s:.0%} busy\n"
        f"{stage_devices(plan.stages[number], cluster)}"
        for number, row in enumerate(rows)
    ]
    whole.set_yticks(range(stages), labels, fontsize=8)
    whole.set_title(
        f"{milliseconds(end_ms)} a step · {plan.schedule}, {plan.microbatches} micro-batches of "
        f"{plan.microbatch_samples} · idle {step.bubble:.0%} · waiting for data {step.exposed_communication:.0%}",
        fontsize=10,
        loc="left",
    )
    if zoomed:
        panels[1][0].set_title("the beginning", fontsize=9, loc="left")
        panels[1][0].set_yticks(range(stages), [f"stage {number}" for number in range(stages)], fontsize=8)
        panels[2][0].set_title("the end", fontsize=9, loc="left")
        panels[2][0].set_yticks([])
    drawn = {event.kind for event in step.events}
    handles = [Patch(color=_COLOURS[kind], label=name) for kind, name in _NAMES.items() if kind in drawn]
    if step.sent:
        handles.append(Patch(color=_SENT[True], label="activations on their way"))
        handles.append(Patch(color=_SENT[False], label="gradients on their way"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8, frameon=False)
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise PlanningError(f"{path}: the picture cannot be written: {error}") from None


def _slowest(step: Step, devices: Iterable[int]) -> int:
    """The device that computes longest; the first of equal ones."""
    return max(devices, key=lambda device: (step.compute_s[device], -device))


def _panel(axes: Axes, step: Step, rows: Sequence[int], begin_ms: float, end_ms: float, points_per_ms: float) -> None:
    row_of = {device: row for row, device in enumerate(rows)}
    axes.set_xlim(begin_ms, end_ms)
    axes.set_ylim(len(rows) - 0.45, -0.45)
    axes.set_xlabel("ms", fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    for row in range(len(rows)):
        axes.axhspan(row - 0.36, row + 0.2, color="#f1f0ee", zorder=0, linewidth=0)
    shown = [e for e in step.events if e.device in row_of and e.end_s * 1e3 > begin_ms and e.start_s * 1e3 < end_ms]
    for kind, colour in _COLOURS.items():
        for row in range(len(rows)):
            events = [e for e in shown if e.kind == kind and row_of[e.device] == row]
            _bars(axes, [(e.start_s, e.end_s) for e in events], row - 0.36, 0.56, colour, points_per_ms)
            for event in events:
                _number(axes, event, row, points_per_ms, begin_ms, end_ms)
    for forward, colour in _SENT.items():
        for row, device in enumerate(rows):
            sent = [s for s in step.sent if s.forward is forward and s.source_device == device]
            spans_ms = [(s.start_s * 1e3, (s.end_s - s.start_s) * 1e3) for s in sent]
            # With an edge, so that the shortest can be seen.
            axes.broken_barh(spans_ms, (row + (0.22 if forward else 0.31), 0.08), color=colour, linewidth=0.7)


def _bars(
    axes: Axes, spans_s: Sequence[tuple[float, float]], top: float, height: float, colour: str, points_per_ms: float
) -> None:
    """Bars; with a gap between them where they are wide enough to be told apart."""
    if spans_s:
        narrowest_ms = min(end - start for start, end in spans_s) * 1e3
        edge = "white" if narrowest_ms * points_per_ms > 3 else "none"
        spans_ms = [(start * 1e3, (end - start) * 1e3) for start, end in spans_s]
        axes.broken_barh(spans_ms, (top, height), facecolors=colour, edgecolors=edge, linewidth=0.4)


def _number(axes: Axes, event: Event, row: int, points_per_ms: float, begin_ms: float, end_ms: float) -> None:
    """The micro-batch's number, where its bar has room for it."""
    start_ms, stop_ms = max(event.start_s * 1e3, begin_ms), min(event.end_s * 1e3, end_ms)
    text = str(event.microbatch)
    # The largest size for which there is room: a digit is about 0.64 of it wide.
    fitting = (size for size in _LABEL_POINTS if (stop_ms - start_ms) * points_per_ms > size * (0.64 * len(text) + 0.2))
    if event.microbatch >= 0 and (points := next(fitting, 0.0)):
        middle = (start_ms + stop_ms) / 2
        axes.text(middle, row - 0.08, text, ha="center", va="center", fontsize=points, color="white")
