"""Collective schedules: which one a fused kernel runs, with how many slices, and in which order of tiles."""

from .algorithms import Reason
from .choose import HYSTERESIS, Candidate, Choice, Decision, Rejected, choose
from .costs import ON_CPU, ON_GPU, Costs
from .request import ORDERS, SCHEDULES, UNFUSED, Measurement, Request
from .schedule import Schedule, Transfer

__all__ = [
    "HYSTERESIS",
    "ON_CPU",
    "ON_GPU",
    "ORDERS",
    "SCHEDULES",
    "UNFUSED",
    "Candidate",
    "Choice",
    "Costs",
    "Decision",
    "Measurement",
    "Reason",
    "Rejected",
    "Request",
    "Schedule",
    "Transfer",
    "choose",
]
