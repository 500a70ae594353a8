"""Profiles of a made-up transformer, from a roofline: what examples/planner/profiles consists of.

Run: python examples/planner/make_profiles.py
"""

from pathlib import Path

from triton_ext.planner import presets
from triton_ext.planner.parallel import profile_files, roofline
from triton_ext.planner.parallel.profiles import Model, Profiles

HIDDEN, BLOCKS, TOKENS, VOCABULARY = 2048, 24, 1024, 32000
FLOAT32 = 4

model = Model(
    "example-gpt",
    parameter_bytes=tuple(
        FLOAT32 * count for count in (VOCABULARY * HIDDEN, *[12 * HIDDEN**2] * BLOCKS, VOCABULARY * HIDDEN)
    ),
    activation_bytes=tuple(
        FLOAT32 * count for count in (*[TOKENS * HIDDEN] * (BLOCKS + 1), TOKENS * VOCABULARY)
    ),
)
devices = {name: presets.device_type(name) for name in ("A100-40", "V100-16")}
wanted = [(name, tp, samples) for name in devices for tp in (1, 2, 4) for samples in (1, 2, 4, 8)]
folder = Path(__file__).parent / "profiles"
files = profile_files.write(roofline.add_modelled(Profiles(model), devices, wanted), folder)
print(f"{len(files)} files in {folder}")
