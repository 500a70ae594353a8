"""Profiles of a made-up transformer, from a roofline: what examples/planner/profiles consists of.

Run: python examples/planner/make_profiles.py
"""

import dataclasses
from pathlib import Path

from triton_ext.planner import presets
from triton_ext.planner.parallel import profile_files, roofline
from triton_ext.planner.parallel.profiles import Key, Model, Point, Profiles

HIDDEN, BLOCKS, TOKENS, VOCABULARY = 2048, 24, 1024, 32000
FLOAT32 = 4

model = Model(
    "example-gpt",
    parameter_bytes=tuple(
        FLOAT32 * count for count in (VOCABULARY * HIDDEN, *[12 * HIDDEN**2] * BLOCKS, VOCABULARY * HIDDEN)
    ),
    activation_bytes=tuple(FLOAT32 * count for count in (*[TOKENS * HIDDEN] * (BLOCKS + 1), TOKENS * VOCABULARY)),
)
devices = {name: presets.device_type(name) for name in ("A100-40", "V100-16")}
FABRIC_BYTES_PER_S = {"A100-40": 300e9, "V100-16": 150e9}


def with_tensor_parallelism(key: Key, point: Point) -> Point:
    """A block's four all-reduces of its activations (two forward, two backward), which the roofline leaves out."""
    name, tp, samples = key
    one_ms = 1e3 * 2 * (tp - 1) / tp * FLOAT32 * TOKENS * HIDDEN * samples / FABRIC_BYTES_PER_S[name]
    first, *blocks, last = point.layer_ms
    layer_ms = (first, *(block_ms + 4 * one_ms for block_ms in blocks), last)
    return dataclasses.replace(point, layer_ms=layer_ms, forward_backward_ms=sum(layer_ms))


wanted = [(name, tp, samples) for name in devices for tp in (1, 2, 4) for samples in (1, 2, 4, 8)]
profiles = roofline.add_modelled(Profiles(model), devices, wanted)
points = {key: with_tensor_parallelism(key, point) for key, point in profiles.points.items()}
folder = Path(__file__).parent / "profiles"
files = profile_files.write(Profiles(model, points), folder)
print(f"{len(files)} files in {folder}")
