"""Parallelism plans: which devices compute which layers, split how, in which pipeline."""
