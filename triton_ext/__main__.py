"""python -m triton_ext, and so torchrun -m triton_ext."""

from .cli import app

app()
