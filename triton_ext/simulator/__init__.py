"""Runs the lowered IR of a kernel for several ranks in one process, every interleaving suspect."""

from .report import Finding, Report
from .simulate import Simulation, result_of, simulate

__all__ = ["Finding", "Report", "Simulation", "result_of", "simulate"]
