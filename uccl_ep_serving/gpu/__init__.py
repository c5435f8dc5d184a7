"""The host side of one GPU: memory that its kernels reach, the order of its streams, how operations are launched."""
