"""Triton kernels that communicate: collectives fused into the store of a kernel."""
