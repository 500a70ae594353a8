"""Host side of a fused collective: groups of ranks, symmetric memory, plans, and the watch over their peers."""
