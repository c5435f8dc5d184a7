"""Machine-level Numba: compiled functions, atomic memory access, calls through addresses.

The floor under ``kernels`` and ``proxy``, which never import each other. Everything works on raw int64 addresses,
because Python objects and arrays cost reference counts inside a ``nogil`` loop, and because mixing uint64 and int64
makes Numba fall back to float64.
"""
