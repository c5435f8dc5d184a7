"""The machine: whose turn it is, threads, warps, blocks, barriers, and what goes wrong with them."""
