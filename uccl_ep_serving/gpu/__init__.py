"""The host side of one GPU: memory that its kernels reach, its windows, the order of its streams."""
