"""Parallelism plans measured and executed: profiles of a PyTorch model, and training steps of a plan under torchrun.

`model` is the contract of what can be profiled and run, `transformer` a small model that meets it. Only the modules
that compute import torch; `quota`, `launch`, `predict` and `export` do not.
"""
