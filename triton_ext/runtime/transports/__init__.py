"""Ways to reach the memory of another rank: one file each."""
