"""One kernel launch as a value, so that launching, compiling ahead and the tests of compiled code use the same ones."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple

import triton

from ...errors import TransportError

_log = logging.getLogger("uccl_ep_serving")

#: Tritons whose launchers, of CUDA and of ROCm, take (x, y, z, stream, function, metadata of the code, metadata of the
#: launch, hook before, hook after, arguments with constants), and compile an integer that is a multiple of 16 as such.
_KNOWN = frozenset({"3.6", "3.7", "3.8", "3.9"})
_KNOBS = triton.knobs.runtime


class _Loaded(NamedTuple):
    """A compiled kernel, loaded into a device.

    Attributes:
        code: as Triton has it, which unloads it when it is collected.
        run: Triton's launcher of it.
        function, metadata: what the launcher takes before the arguments.
        constants: what the launcher takes behind the arguments, and does not look at.
        aligned: places of the arguments that it was compiled for as multiples of 16.
    """

    code: Any
    run: Callable[..., None]
    function: int
    metadata: Any
    constants: tuple[Any, ...]
    aligned: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Variant:
    """A kernel and all that it is compiled for.

    Attributes:
        kernel: what ``triton.jit`` made.
        constants: its ``tl.constexpr`` parameters by name.
        warps: of a program.
        fused: multiplication and addition may become one rounding.
        registers: of a thread at most, 0 = the compiler decides. CUDA alone takes it.
        loaded: by device; written by :meth:`Launch.compile`.
    """

    kernel: Any
    constants: Mapping[str, Any]
    warps: int = 1
    fused: bool = True
    registers: int = 0
    loaded: dict[Any, _Loaded] = field(default_factory=dict, init=False, repr=False)

    @property
    def options(self) -> dict[str, Any]:
        """What Triton is told beside the arguments and constants."""
        limit = {"maxnreg": self.registers} if self.registers else {}
        return {"num_warps": self.warps, "enable_fp_fusion": self.fused, **limit}

    def __post_init__(self) -> None:
        # in the interpreter there is none
        if getattr(self.kernel, "hash", "") is None:
            _hash(self.kernel, set())


class Launch(NamedTuple):
    """A kernel with its arguments.

    Attributes:
        variant: of the kernel.
        grid: programs, x, y and z.
        arguments: int64, in the order of the kernel's parameters, which its constants follow.
    """

    variant: Variant
    grid: tuple[int, int, int]
    arguments: tuple[int, ...]

    @property
    def kernel(self) -> Any:
        """What ``triton.jit`` made."""
        return self.variant.kernel

    @property
    def constants(self) -> Mapping[str, Any]:
        """Its ``tl.constexpr`` parameters by name."""
        return self.variant.constants

    def run(self) -> None:
        """Launch on the current stream.

        What :meth:`compile` has loaded goes to Triton's launcher at once, which takes the host a fifth of the time of
        Triton's own way there, which looks the code up by the types and values of all arguments. Triton's own way is
        taken by arguments for which it would compile other code, and while a profiler listens to launches.
        """
        variant, grid, arguments = self
        before, after = _KNOBS.launch_enter_hook, _KNOBS.launch_exit_hook
        # chains of functions, or one
        if variant.loaded and not (getattr(before, "calls", before) or getattr(after, "calls", after)):
            driver = triton.runtime.driver.active
            device = driver.get_current_device()
            loaded = variant.loaded.get(device)
            if loaded is not None:
                _, run, function, metadata, constants, aligned = loaded
                for place in aligned:
                    if arguments[place] & 15:
                        break
                else:
                    stream = driver.get_current_stream(device)
                    run(*grid, stream, function, metadata, None, None, None, *arguments, *constants)
                    return
        self.run_by_triton()

    def run_by_triton(self) -> None:
        """Launch on the current stream, Triton's own way."""
        one = self.variant
        one.kernel[self.grid](*self.arguments, **one.constants, **one.options)

    def build(self) -> Any:
        """Compile without launching, into Triton's cache; what Triton makes of it."""
        one = self.variant
        built = one.kernel.warmup(*self.arguments, **one.constants, **one.options, grid=self.grid)
        # At each launch of its own way Triton compares every global name that the kernel reads with its value when it
        # was compiled, 0.6 us each: 80 us of a kernel that reads 133. They are constants of modules.
        one.kernel.used_global_vals.clear()
        return built

    def compile(self) -> None:
        """:meth:`build`, and load what is compiled into the device. Does nothing in the interpreter.

        A launch loads it otherwise, which no graph can capture.

        Raises:
            TransportError: the device does not take it.
        """
        if triton.knobs.runtime.interpret:
            return
        built = self.build()
        try:
            # a launcher for this grid, which is not called: making it loads
            built[self.grid]
        except RuntimeError as error:
            raise TransportError(
                f"{built.name} is compiled, and the GPU does not load it: {error}. Likely cause: its memory is taken, "
                "or a kernel of this process has failed before. Next step: give the engine less of it (its memory "
                "fraction), or find the first kernel that failed (compute-sanitizer, CUDA_LAUNCH_BLOCKING=1)"
            ) from error
        if not _launcher_is_known():
            return
        one, count = self.variant, len(self.arguments)
        parameters = one.kernel.params[:count]
        aligned = tuple(place for place, parameter in enumerate(parameters) if not parameter.do_not_specialize)
        # what Triton compiles for other arguments is other code
        if not any(self.arguments[place] & 15 for place in aligned):
            constants = tuple(one.constants[name] for name in one.kernel.arg_names[count:])
            device = triton.runtime.driver.active.get_current_device()
            one.loaded[device] = _Loaded(built, built.run, built.function, built.packed_metadata, constants, aligned)


@functools.cache
def _launcher_is_known() -> bool:
    """Whether launchers of this Triton take what :meth:`Launch.run` gives them; said once where they may not."""
    version: str = triton.__version__
    if ".".join(version.split(".")[:2]) in _KNOWN:
        return True
    _log.warning(
        "Triton %s is not one of those whose launchers are known here (%s): kernels are launched Triton's own way, "
        "which takes the host about 30 us more for each",
        version,
        ", ".join(sorted(_KNOWN)),
    )
    return False


def _hash(function: Any, seen: set[int]) -> None:
    """Have Triton hash all that ``function`` calls before itself.

    The hash is part of the key in Triton's cache. Triton 3.6 takes in the constants that a callee reads only if it was
    hashed before, so that the key of a kernel would depend on which kernels were compiled before it in this process.
    """
    names, known = function.fn.__code__.co_names, function.fn.__globals__
    read = [known.get(name) for name in names]
    read += [getattr(one, name, None) for one in read if isinstance(one, ModuleType) for name in names]
    for one in read:
        if isinstance(one, triton.JITFunction) and id(one) not in seen:
            seen.add(id(one))
            _hash(one, seen)
    function.cache_key  # noqa: B018
