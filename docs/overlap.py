"""Draws docs/overlap.png: what a fused collective overlaps, seen from one rank. A schematic, not a measurement."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

COMPUTE, OWN, SEND, WAIT = "#4878a8", "#9db8d2", "#e08a3c", "#bbbbbb"
TILES, SLOTS = 12, 3


def program(axes: Axes, row: float, start: float, width: float, color: str, text: str = "") -> None:
    axes.barh(row, width, left=start, height=0.8, color=color, edgecolor="white")
    axes.text(start + width / 2, row, text, ha="center", va="center", fontsize=7, color="white")


def main() -> None:
    figure, (unfused, fused) = plt.subplots(2, 1, figsize=(8, 4.2), sharex=True, layout="constrained")
    for axes, title in (
        (unfused, "unfused: kernel, then collective"),
        (fused, "fused: every tile leaves when it is computed"),
    ):
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_yticks(range(SLOTS + 1), [*(f"WG slot {slot}" for slot in range(SLOTS)), "link"], fontsize=8)
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)

    for tile in range(TILES):
        step, slot = divmod(tile, SLOTS)
        own = tile >= TILES // 2
        color = OWN if own else COMPUTE
        program(unfused, slot, step, 1, color, f"tile {tile}")
        program(fused, slot, step, 1, color, f"tile {tile}" if not own else f"own {tile}")
    end = TILES / SLOTS
    program(unfused, SLOTS, end, 2.0, SEND, "all-to-all of the whole result")
    for tile in range(TILES // 2):
        step, slot = divmod(tile, SLOTS)
        program(fused, SLOTS, step + 1 + slot * 0.33, 0.33, SEND, str(tile))
    program(fused, 0, end, 0.25, WAIT)
    fused.annotate(
        "tail: all arrived", (end + 0.25, 0), (end + 0.7, 0), va="center", fontsize=8, arrowprops={"arrowstyle": "-"}
    )
    fused.set_xlabel("time (tiles)", fontsize=9)
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=130)


if __name__ == "__main__":
    main()
