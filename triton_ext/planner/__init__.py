"""Planning from data: what runs where, in which order. Imports neither Triton nor torch."""
