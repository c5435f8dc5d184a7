"""Kernels of low latency made wrong, in their PTX or in their source, and whether the model machine notices."""
