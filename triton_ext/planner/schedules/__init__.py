"""Collective schedules: which one a fused kernel runs, with how many slices, and in which order of tiles."""

from .algorithms import Reason
from .choose import HYSTERESIS, Candidate, Choice, Decision, Rejected, choose
from .request import ORDERS, SCHEDULES, UNFUSED, Costs, Measurement, Request
from .schedule import Schedule, Transfer

__all__ = [
    "HYSTERESIS",
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
