"""``uccl-ep doctor``: what this machine can do for expert parallelism, and what to do about what it cannot."""
