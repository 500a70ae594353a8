"""What `triton.language.extra.libdevice` means on the CPU: each function by name, from the vector math library."""
