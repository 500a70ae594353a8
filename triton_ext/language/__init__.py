"""What a kernel author types: `import triton_ext.language as txl`.

Importing this module installs the compiler passes, so a plain `@triton.jit` kernel is enough.
"""

from __future__ import annotations

from ..passes import install
from .core import Epilogue, epilogue

install()

__all__ = ["Epilogue", "epilogue"]
