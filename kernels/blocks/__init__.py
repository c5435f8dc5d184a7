"""The int64 blocks through which the host and the kernels work: every word of them is declared here, once.

A block is plain memory that kernels get by its address. Code names a word by its module (``block.SENT``): Numba takes
that as the constant it is. Triton does not, see ``triton/blocks``.
"""
