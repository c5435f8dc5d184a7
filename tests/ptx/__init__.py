"""Compiled kernels without a GPU: PTX as host code, on a machine that a seed schedules, with memory as weak as PTX's.

``translation`` makes host code of PTX, ``machine`` runs its threads, ``memory`` says what a load returns, ``litmus``
holds that to the published model, ``product`` puts the ranks of the product on it.
"""
