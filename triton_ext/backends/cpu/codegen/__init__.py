"""The CPU code generator: Triton IR, read by `triton_ext.ir`, to LLVM IR to object code."""
