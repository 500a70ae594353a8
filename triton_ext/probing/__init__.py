"""What a group of ranks can do, measured: `triton-ext probe`, under torchrun."""
