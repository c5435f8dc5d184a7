"""Kernels for CPU tensors, compiled by Numba: one subject per module.

All entry points take int64 addresses and plain integers, run without the GIL, never raise and return a ``STATUS_*``
of ``protocol.context``. Some have more than ten parameters, one for each tensor of a call: in a block between them the
host would store each before it calls, and nobody could see in a call what it reads and writes.
"""
