"""Machine code from Python: compiled functions and how they are kept, atomic memory access, calls through addresses.

The floor under ``kernels`` and ``proxy``, which never import each other. Everything works on raw int64 addresses,
because Python objects and arrays cost reference counts inside a loop without the GIL, and because mixing uint64 and
int64 makes Numba fall back to float64.
"""
