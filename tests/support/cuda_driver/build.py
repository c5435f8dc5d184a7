"""Compiles the stub of the driver, once for each state of its sources, and says how a process comes to load it."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from uccl_ep_serving.native.cache import places, usable

__all__ = ["LACKING", "environment"]

_SOURCES = sorted(Path(__file__).parent.glob("*.[ch]"))
_LIBRARY = "libcuda.so.1"


def _compiler() -> str | None:
    """The one that Triton takes."""
    return os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")


def _lacking() -> str:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    return "" if _compiler() else "no C compiler (gcc or clang)"


#: Why there is no stub here, "" where there is one.
LACKING = _lacking()


@functools.cache
def library_directory() -> Path:
    """The directory that holds the stub. Its path is the same in every run, since Triton keeps by it what it compiles
    against the driver."""
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in _SOURCES)).hexdigest()[:16]
    directory = next(filter(usable, places(f"stub-driver-{digest}")))
    if not (directory / _LIBRARY).exists():
        triton, compiler = importlib.util.find_spec("triton"), _compiler()
        assert triton is not None
        assert triton.origin is not None
        assert compiler is not None
        # Triton brings CUDA's headers
        include = Path(triton.origin).parent / "backends/nvidia/include"
        with tempfile.TemporaryDirectory(dir=directory) as apart:
            made = Path(apart) / _LIBRARY
            flags = ["-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-Wl,-soname,{_LIBRARY}"]
            sources = [str(path) for path in _SOURCES if path.suffix == ".c"]
            command = [compiler, *flags, f"-I{include}", "-o", str(made), *sources, "-ldl", "-lpthread"]
            subprocess.run(command, check=True, timeout=60)
            made.rename(directory / _LIBRARY)
    return directory


def environment(*paths: str) -> dict[str, str]:
    """Of a process whose driver is the stub, in which Triton compiles, and for which ``paths`` come first on
    ``sys.path``."""
    there = str(library_directory())
    found = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    places = (*paths, found.get("PYTHONPATH", ""))
    found["PYTHONPATH"] = os.pathsep.join(filter(None, places))
    # ld.so's, and where Triton looks before it asks ldconfig
    return {**found, "LD_LIBRARY_PATH": there, "TRITON_LIBCUDA_PATH": there}
