"""Kernels of low latency made wrong: ``make kernel-faults``, or ``python -m tests.ptx.faults --help``."""

from __future__ import annotations

if __name__ == "__main__":
    from tests.ptx.faults.command import app

    app()
