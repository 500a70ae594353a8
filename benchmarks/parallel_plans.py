"""How fast parallelism plans are searched: python benchmarks/parallel_plans.py

A costed plan has been enumerated, its layers balanced, its memory checked and its cost computed; what is divided by is
the CPU time of the whole search on one core, from profiles to ranked plans, tables and enumeration included. "balanced"
also has the plans that do not fit the memory after three attempts, which take longer than those that fit; "tried" also
has the choices that cannot run at all. The public profiles are read from TRITON_EXT_DATA (../shared/data) where they
are; without them, modelled profiles are used.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass
from pathlib import Path

from triton_ext.planner import presets
from triton_ext.planner.parallel import metis, profile_files
from triton_ext.planner.parallel.profiles import Model, Profiles
from triton_ext.planner.parallel.roofline import add_modelled

REPEATS = 3
LONG_S = 5.0  # a search that takes longer is not repeated


@dataclass(frozen=True)
class Case:
    model: str
    counts: dict[str, int]
    global_batch: int
    settings: metis.MetisSettings


WIDE, NARROW = metis.MetisSettings(0.5, 10), metis.MetisSettings(1.0, 6)
SPEED_CASES = (
    Case("OPT-350", {"A100-40": 8}, 128, WIDE),
    Case("OPT-350", {"A100-40": 8, "V100-16": 8}, 128, WIDE),
    Case("OPT-350", {"A100-40": 8, "V100-16": 4, "GH-96": 4}, 256, NARROW),
    Case("OPT-350", {"A100-40": 8, "V100-16": 4, "GH-96": 4}, 256, WIDE),
    Case("OPT-350", {"A100-80": 16}, 256, WIDE),
    Case("OPT-350", {"RTX-2080": 5, "RTX-3090": 4, "Titan-RTX": 3}, 192, WIDE),
    Case("GPT-Neo-2.7", {"A100-40": 32, "V100-16": 16, "GH-96": 16}, 256, NARROW),
)


def public_profiles() -> Path | None:
    root = Path(os.environ.get("TRITON_EXT_DATA", Path(__file__).parents[2] / "shared" / "data"))
    folder = root / "planner" / "sailor_metis_profiles"
    return folder if folder.is_dir() else None


def modelled_profiles(case: Case) -> Profiles:
    """Of a transformer with 24 blocks of 1024 features, on the case's device types."""
    hidden, tokens, vocabulary = 1024, 2048, 50_272
    block, table = 4 * 12 * hidden**2, 4 * vocabulary * hidden
    handed_on = 4 * tokens * hidden
    model = Model("modelled", (table, *[block] * 24, table), (*[handed_on] * 25, 4 * tokens * vocabulary))
    wanted = [(name, tp, samples) for name in case.counts for tp in (1, 2, 4) for samples in (1, 2, 4, 8)]
    return add_modelled(Profiles(model), presets.DEVICE_TYPES, wanted)


def metis_speed(cases: tuple[Case, ...] = SPEED_CASES) -> list[dict[str, object]]:
    """One row for each case: what was costed, and in which CPU time (the best of three)."""
    folder, rows = public_profiles(), []
    for case in cases:
        profiles = profile_files.read(folder, case.model)[0] if folder else modelled_profiles(case)
        cluster = presets.cluster(case.counts)
        best_s = float("inf")
        for _ in range(REPEATS):
            begin_s = time.process_time()
            result = metis.search(profiles, cluster, case.global_batch, case.settings)
            best_s = min(best_s, time.process_time() - begin_s)
            if best_s > LONG_S:
                break
        rejected = {each.code: each.count for each in result.rejected}
        rows.append(
            {
                "model": profiles.model.name,
                "devices": " ".join(f"{count} {name}" for name, count in case.counts.items()),
                "batch": case.global_batch,
                "prunes": f"{case.settings.min_group_scale_variance:g}, {case.settings.max_permute_len}",
                "tried": result.costed + sum(rejected.values()),
                "balanced": result.costed + rejected.get("memory", 0),
                "costed": result.costed,
                "cpu_ms": round(best_s * 1e3, 1),
                "costed_per_ms": round(result.costed / best_s / 1e3, 1),
                "best_ms": round(result.best.cost.total_ms, 1) if result.best else None,
            }
        )
    return rows


def tell(title: str, rows: list[dict[str, object]]) -> None:
    print(title)
    names = list(rows[0])
    widths = [max(len(name), *(len(str(row[name])) for row in rows)) for name in names]
    for line in [names, *([str(row[name]) for name in names] for row in rows)]:
        print("  " + "  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="without the largest case")
    options = parser.parse_args()
    cases = tuple(case for case in SPEED_CASES if not options.short or sum(case.counts.values()) <= 16)
    tell("Metis's published search", metis_speed(cases))


if __name__ == "__main__":
    main()
