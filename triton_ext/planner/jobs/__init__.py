"""Priorities among jobs that share a network: Crux (SIGCOMM 2024), baselines and a simulator of flows."""
