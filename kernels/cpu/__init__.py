"""Kernels for CPU tensors, compiled by Numba: one subject per module.

All entry points take int64 addresses and plain integers, run without the GIL, never raise and return a ``STATUS_*``
of ``protocol.context``.
"""
