"""The one place where a bit, an offset or a message format is defined (standard library only).

Kernels, proxies, transports and tests import it; the tables of ``docs/architecture/formats.md`` are generated from it.
"""
