"""Backends that this package registers with Triton."""
