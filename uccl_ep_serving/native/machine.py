"""This machine's processor, and machine code in memory: through LLVM, without Numba."""

from __future__ import annotations

import functools
import os
import platform
import threading
from collections.abc import Callable, Iterable
from typing import Any

import llvmlite.binding as llvm

from ..errors import ConfigError
from .python_entry import built_in, python_symbol

__all__ = ["half_instructions", "load_object", "processor", "target_machine"]

_lock = threading.Lock()


@functools.cache
def processor() -> tuple[str, str]:
    """Name and features of the processor to compile for: this machine's, or what NUMBA_CPU_NAME and
    NUMBA_CPU_FEATURES say. A name alone has the features that LLVM knows of it."""
    name, features = os.environ.get("NUMBA_CPU_NAME"), os.environ.get("NUMBA_CPU_FEATURES")
    if features is None:
        features = "" if name else llvm.get_host_cpu_features().flatten()
    return name or llvm.get_host_cpu_name(), features


@functools.cache
def half_instructions() -> bool:
    """Whether the processor converts float16: x86 with F16C (since 2012), and AArch64.

    Elsewhere LLVM calls ``__extendhfsf2`` of the compiler's run-time library, and there is none in memory.
    """
    return platform.machine() in ("aarch64", "arm64") or "+f16c" in processor()[1].split(",")


@functools.cache
def target_machine() -> Any:
    """LLVM's description of this machine, for code that is loaded where it runs."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    name, features = processor()
    target = llvm.Target.from_triple(llvm.get_process_triple())
    static = platform.machine() in ("x86_64", "AMD64", "i686")
    return target.create_target_machine(
        cpu=name,
        features=features,
        opt=3,
        reloc="static" if static else "default",
        codemodel="jitdefault",
        jit=True,
    )


def check_executable() -> None:
    """Raise ConfigError where this process may not run machine code that is made while it runs."""
    try:
        llvm.check_jit_execution()
    except OSError as error:
        raise ConfigError(
            f"this process may not make memory executable ({error}), which compiled kernels and proxies need. Likely "
            "cause: systemd's MemoryDenyWriteExecute, or SELinux without execmem. Next step: allow it for this service"
        ) from None


@functools.cache
def _engine() -> Any:
    check_executable()  # else the first call would end the process
    module = llvm.parse_assembly("")
    module.triple = llvm.get_process_triple()
    return llvm.create_mcjit_compiler(module, target_machine())


def load_object(code: bytes, symbols: Iterable[str]) -> dict[str, tuple[Callable[..., Any], int]]:
    """Load object code; by symbol, a built-in function that releases the GIL, and the address of the C function. It
    stays for good.

    Args:
        code: as :func:`.compiler.emit` returns it.

    Raises:
        KeyError: a symbol is not there.
    """
    with _lock:
        engine = _engine()
        engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        engine.finalize_object()
        found: dict[str, tuple[Callable[..., Any], int]] = {}
        for symbol in symbols:
            address, python = (engine.get_function_address(name) for name in (symbol, python_symbol(symbol)))
            if not address or not python:
                raise KeyError(symbol)
            found[symbol] = built_in(symbol, python), address
        return found
