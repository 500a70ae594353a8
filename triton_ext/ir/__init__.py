"""Reader of Triton IR: text to an xDSL module. Independent of any backend."""

from triton_ext.ir.reader import call_chain, read_module, source_line

__all__ = ["call_chain", "read_module", "source_line"]
