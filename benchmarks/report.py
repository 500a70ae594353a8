"""Records of a benchmark as a Markdown table and as a plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

Record = dict[str, Any]
Row = tuple[str, str, dict[str, Record]]

_LABELS = {
    "fused": "fused",
    "fused_one_shot": "fused, one shot",
    "unfused_gloo": "unfused, gloo",
    "unfused_mpi": "unfused, MPI",
    "compute_only": "compute only",
    "triton_ext": "triton_ext",
    "torch": "torch",
    "onednn": "oneDNN",
    "one_thread": "triton_ext, one thread",
    "wire": "wire",
    "limit": "limit",
}


def rows(records: list[Record]) -> list[Row]:
    """(operator, shape, variant -> record) for each case, in the order measured."""
    found: dict[tuple[str, str], dict[str, Record]] = {}
    for record in records:
        shape = ", ".join(f"{name} {size}" for name, size in record["shape"].items())
        found.setdefault((record["operator"], shape), {})[record["variant"]] = record
    return [(operator, shape, variants) for (operator, shape), variants in found.items()]


def _ms(variants: dict[str, Record], name: str) -> float | None:
    return variants[name]["median_ms"] if name in variants else None


def hidden(variants: dict[str, Record], against: str = "unfused_gloo") -> float | None:
    """The part of the communication that fusing hides: 1 is all of it.

    None where the unfused operator takes less than a tenth longer than our kernel alone: there is too little
    communication, or torch's kernel is too much faster than ours, for the quotient to mean anything.
    """
    unfused, fused, compute = (variants[name]["median_ms"] for name in (against, "fused", "compute_only"))
    return (unfused - fused) / (unfused - compute) if unfused > 1.1 * compute else None


def markdown(records: list[Record]) -> str:
    """Medians in ms, ratios of medians."""
    names = [name for name in _LABELS if any(record["variant"] == name for record in records)]
    head = ["operator", "shape", *(f"{_LABELS[name]} (ms)" for name in names)]
    head += ["fused / compute only", "fused / gloo"] + (["fused / MPI"] if "unfused_mpi" in names else [])
    head += ["communication hidden", ""]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * 2 + "---:|" * (len(head) - 3) + "---|"]
    for operator, shape, variants in rows(records):
        fused = variants["fused"]["median_ms"]
        cells = [f"`{operator}`", shape]
        cells += [f"{ms:.3g}" if (ms := _ms(variants, name)) is not None else "" for name in names]
        against = ["compute_only", "unfused_gloo"] + (["unfused_mpi"] if "unfused_mpi" in names else [])
        cells += [f"{fused / ms:.2f}" if (ms := _ms(variants, name)) else "" for name in against]
        share = hidden(variants)
        cells.append("" if share is None else f"{share:.2f}")
        slower = [_LABELS[n] for n in against[1:] if (ms := _ms(variants, n)) and fused > ms]
        cells.append(f"slower than {' and '.join(slower)}" if slower else "")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(
    records: list[Record],
    path: Path,
    limit_is: str = "max(compute only, copy of what leaves the rank)",
    *,
    logarithmic: bool = False,
) -> None:
    """Times relative to the limit, a group of bars for each case; whiskers from the 10th to the 90th percentile."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases = rows(records)
    names = [
        name for name in _LABELS if name not in ("wire", "limit") and any(name in variants for *_, variants in cases)
    ]
    colours = {
        "fused": "#1b7f5c",
        "fused_one_shot": "#6cc3a0",
        "unfused_gloo": "#c9803a",
        "unfused_mpi": "#7a6bb0",
        "compute_only": "#b8b8b8",
        "triton_ext": "#1b7f5c",
        "torch": "#c9803a",
        "onednn": "#7a6bb0",
        "one_thread": "#b8b8b8",
    }
    figure, axis = pyplot.subplots(figsize=(9, 0.62 * len(cases) + 1.6), layout="constrained")
    height = 0.8 / len(names)
    labelled: set[str] = set()
    for i, name in enumerate(names):
        for at, (*_, variants) in enumerate(cases):
            if name not in variants:
                continue
            limit, record = variants["limit"]["median_ms"], variants[name]
            median, low, high = (record[key] / limit for key in ("median_ms", "p10_ms", "p90_ms"))
            axis.barh(
                at + (i - (len(names) - 1) / 2) * height,
                median,
                height * 0.9,
                xerr=[[max(0, median - low)], [max(0, high - median)]],
                color=colours[name],
                error_kw={"linewidth": 0.8},
                label=None if name in labelled else _LABELS[name],
            )
            labelled.add(name)
    axis.axvline(1, color="black", linewidth=0.8)
    axis.set_yticks(range(len(cases)), [f"{operator}\n{shape}" for operator, shape, _ in cases], fontsize=8)
    axis.margins(y=0.01)
    axis.invert_yaxis()
    if logarithmic:
        axis.set_xscale("log")
    axis.set_xlabel(f"time / limit, where limit = {limit_is}")
    figure.legend(loc="outside upper center", ncols=len(names), frameon=False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
