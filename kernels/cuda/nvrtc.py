"""From CUDA C to PTX and machine code for GPUs that need not be there, by NVRTC; kept between processes.

CUDA builds of torch bring NVRTC (``nvidia-cuda-nvrtc``). Its C interface has been the same for ten years, so that the
library itself is called, of whichever CUDA it is. Code is known by its text and headers, by what it is compiled for and
with, and by the version of NVRTC.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import hashlib
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from ...errors import ConfigError
from ...native.cache import places, read_object, usable, write_object

__all__ = ["GPUS", "Binary", "compiled", "headers", "version"]

#: Those that have bulk copies, and that the kernels are checked for.
GPUS = ("sm_90", "sm_100")
#: Lines of the source stand in PTX, and for profilers in the machine code.
_OPTIONS = ("--std=c++17", "--generate-line-info")
_MISSING = (
    "kernels in CUDA C need NVRTC, and libnvrtc is not found. Likely cause: this torch was not built for CUDA, or CUDA "
    "is installed without it. Next step: pip install nvidia-cuda-nvrtc (nvidia-cuda-nvrtc-cu12 for CUDA 12)"
)


class Binary(NamedTuple):
    """What one source became.

    Attributes:
        ptx: its text.
        cubin: the machine code, for one architecture.
    """

    ptx: str
    cubin: bytes


def headers() -> dict[str, str]:
    """Texts of this folder's headers by their names."""
    return {path.name: path.read_text() for path in sorted(Path(__file__).parent.glob("*.cuh"))}


def compiled(
    text: str,
    name: str,
    gpu: str,
    constants: Mapping[str, int] | None = None,
    included: Mapping[str, str] | None = None,
) -> Binary:
    """``text`` for ``gpu``, from the cache or compiled into it.

    Args:
        name: of the file, for messages and lines.
        gpu: its architecture, one of :data:`GPUS` or a newer one.
        constants: macros, such as the number of stages of a ring.
        included: headers by name; None: those of this folder.

    Raises:
        ConfigError: NVRTC is missing, does not know ``gpu`` or refuses the source.
    """
    options = (*_OPTIONS, f"--gpu-architecture={gpu}", *(f"-D{one}={n}" for one, n in (constants or {}).items()))
    included = headers() if included is None else included
    key = hashlib.sha256(repr((text, name, options, sorted(included.items()), version())).encode()).hexdigest()[:32]
    directory = next(filter(usable, places("cuda")), None)
    if directory:
        kept = [read_object(directory / f"{key}.{kind}") for kind in ("ptx", "cubin")]
        if kept[0] is not None and kept[1] is not None:
            return Binary(kept[0].decode(), kept[1])
    found = _compile(text, name, options, included)
    if directory:
        write_object(directory / f"{key}.ptx", found.ptx.encode())
        write_object(directory / f"{key}.cubin", found.cubin)
    return found


def _libraries() -> Iterator[Path]:
    """In NVIDIA's wheels, the newest first: nvidia/cu13/lib, or nvidia/cuda_nvrtc/lib of CUDA 12."""
    spec = importlib.util.find_spec("nvidia")
    for place in (spec and spec.submodule_search_locations) or ():
        found = Path(place).glob("*/lib/libnvrtc.so.*")
        yield from sorted(found, key=lambda path: int(path.suffix[1:] or 0), reverse=True)


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    """The library. It looks for its part with the builtin functions by name only, so that is loaded before it."""
    path = next(_libraries(), None)
    if path is None:
        name = ctypes.util.find_library("nvrtc")
        if name is None:
            raise ConfigError(_MISSING)
        return ctypes.CDLL(name)
    for part in path.parent.glob("libnvrtc-builtins.so.*"):
        ctypes.CDLL(str(part), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(path))


@functools.cache
def version() -> tuple[int, int]:
    """Of NVRTC, which is that of its CUDA.

    Raises:
        ConfigError: it is missing.
    """
    major, minor = ctypes.c_int(), ctypes.c_int()
    _nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


def _texts(texts: tuple[str, ...]) -> ctypes.Array[ctypes.c_char_p]:
    return (ctypes.c_char_p * len(texts))(*(one.encode() for one in texts))


def _compile(text: str, name: str, options: tuple[str, ...], included: Mapping[str, str]) -> Binary:
    library, program = _nvrtc(), ctypes.c_void_p()
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    names, contents = _texts(tuple(included)), _texts(tuple(included.values()))
    _check(
        library,
        library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), name.encode(), len(included), contents, names),
    )
    try:
        if library.nvrtcCompileProgram(program, len(options), _texts(options)):
            log = _part("ProgramLog", program).rstrip(b"\0").decode()
            raise ConfigError(f"NVRTC {version()} refuses {name} with {' '.join(options)}:\n{log}")
        ptx, cubin = _part("PTX", program), _part("CUBIN", program)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))
    return Binary(ptx.rstrip(b"\0").decode(), cubin)


def _part(what: str, program: ctypes.c_void_p) -> bytes:
    """Something that NVRTC tells of a program."""
    library, size = _nvrtc(), ctypes.c_size_t()
    _check(library, getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    content = ctypes.create_string_buffer(size.value)
    _check(library, getattr(library, f"nvrtcGet{what}")(program, content))
    return content.raw


def _check(library: ctypes.CDLL, status: int) -> None:
    if status:
        raise ConfigError(f"NVRTC {version()} fails: {library.nvrtcGetErrorString(status).decode()}")
