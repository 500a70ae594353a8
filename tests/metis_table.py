"""Profiles for tests: the figures that Metis was published with (GPT of 10 layers, A100), and made-up ones."""

import os
from pathlib import Path

import pytest

from triton_ext.planner.parallel.profiles import Model, Point, Profiles

MIB = 1 << 20
LAYERS, HIDDEN, SEQUENCE, VOCABULARY = 10, 4096, 1024, 51200
# (tp, samples): forward and backward ms; block, embedding and head ms; optimizer ms; MiB of embedding, block, head
FIGURES = {
    (1, 1): (292.80, 29.508, 0.289, 0.410, 39.309, 7820, 4146, 12132),
    (1, 2): (580.26, 58.863, 0.628, 0.656, 39.597, 8078, 4838.5, 14554),
    (1, 4): (1143.98, 116.566, 1.096, 1.066, 39.474, 9078, 6259, 26084),
    (2, 1): (167.60, 16.838, 1.163, 0.353, 20.270, 4378, 2119.5, 6232),
    (2, 2): (313.36, 32.242, 1.720, 0.469, 20.302, 4279, 2607.5, 8833),
    (2, 4): (611.70, 63.252, 2.507, 0.670, 20.455, 4174, 4042, 11930),
    (4, 1): (99.92, 10.217, 1.026, 0.338, 10.814, 2257.25, 1140.5, 3067.75),
    (4, 2): (179.92, 19.173, 1.830, 0.404, 10.793, 2681.25, 1425.5, 4679.25),
    (4, 4): (335.29, 35.824, 2.949, 0.679, 10.964, 2591.75, 2067, 6305.75),
}


def metis_profiles(device_type="A100-80", slower=None):
    """The published figures; `slower` adds device types whose times are a multiple."""
    model = Model(
        "gpt",
        (393_216_000, *[202_383_360] * 8, 393_220_096),
        (*[SEQUENCE * HIDDEN * 4] * 9, SEQUENCE * VOCABULARY * 4),
    )
    points = {}
    for name, factor in {device_type: 1.0, **(slower or {})}.items():
        for (tp, samples), (whole, block, first, last, optimizer, *memory) in FIGURES.items():
            points[name, tp, samples] = Point(
                layer_ms=tuple(factor * ms for ms in (first, *[block] * 8, last)),
                memory_bytes=tuple(round(m * MIB) for m in (memory[0], *[memory[1]] * 8, memory[2])),
                forward_backward_ms=factor * whole,
                optimizer_ms=factor * optimizer,
            )
    return Profiles(model, points)


def shared_profiles():
    """The folder of public profiles; skips the test where it is not there."""
    root = Path(os.environ.get("TRITON_EXT_DATA", Path(__file__).parents[2] / "shared" / "data"))
    folder = root / "planner" / "sailor_metis_profiles"
    if not folder.is_dir():
        pytest.skip(f"no public profiles at {folder}; set TRITON_EXT_DATA")
    return folder
