"""Kernels in CUDA C as NVRTC compiles them, on the model machine."""
