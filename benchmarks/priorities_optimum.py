"""How near to the enumerated optimum Crux's algorithms are on random clusters: python benchmarks/priorities_optimum.py

Simulated; writes the picture in docs/priorities.md.
"""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from triton_ext.planner.jobs.study import Nearness, nearness


def draw(values: dict[str, NDArray[np.float64]], png: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(9, 2.9), sharey=True)
    names = list(values)
    for axis, ours, without in zip(axes, names[:3], names[3:], strict=True):
        for name, style in ((ours, "-"), (without, ":")):
            share = np.sort(values[name])
            axis.plot(100 * share, 100 * np.arange(1, len(share) + 1) / len(share), style, label=name.replace("_", " "))
        axis.axvline(97, color="grey", linewidth=0.8)
        axis.set_xlim(70, 100.5)
        axis.set_xlabel("% of the optimum")
        axis.legend(fontsize=8, loc="upper left")
    axes[0].set_ylabel("% of clusters at most there")
    figure.tight_layout()
    figure.savefig(png, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clusters", type=int, default=1500)
    parser.add_argument("--png", type=Path)
    arguments = parser.parse_args()
    found = [nearness(seed) for seed in range(arguments.clusters)]
    values = {field.name: np.array([getattr(near, field.name) for near in found]) for field in fields(Nearness)}
    for name, shares in values.items():
        print(
            f"{name:20}: mean {shares.mean():.2%}, 5th percentile {np.percentile(shares, 5):.2%}, "
            f"worst {shares.min():.2%}, below 97 % in {np.mean(shares < 0.97):.1%} of {len(shares)} clusters"
        )
    if arguments.png:
        draw(values, arguments.png)


if __name__ == "__main__":
    main()
