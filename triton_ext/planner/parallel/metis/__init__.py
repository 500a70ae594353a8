"""Metis's published search (USENIX ATC 2024) and its cost, after its description, with any number of devices.

result = metis.search(profiles, cluster, global_batch=256)
"""

from .cost import evaluate, evaluate_with_memory
from .search import search
from .settings import MetisSettings

__all__ = ["MetisSettings", "evaluate", "evaluate_with_memory", "search"]
