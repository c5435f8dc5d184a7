"""What is wrong, as ``uccl-ep check`` prints it: where, what was expected and found, the cause, the next step."""

from __future__ import annotations

import signal
import traceback
from dataclasses import dataclass, replace

from ..errors import BootstrapError, ConfigError, PeerError

__all__ = ["REPORT", "Fault", "Wrong", "died", "expect", "late", "of", "slow"]

REPORT = "report what `uccl-ep check --gpu --json` and `uccl-ep doctor --json` print; meanwhile serve without uccl_ep"
_DEFECT = "a defect of this kernel, or of Triton's compiler, on this GPU"
#: By words of an error in lower case: the likely cause, and the next step. The first that fits counts.
_CAUSES: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (
        ("out of memory",),
        "other processes hold the GPU's memory",
        "end them, or wait until they have ended, and check again",
    ),
    (
        ("memoryerror",),
        "this process may have no more memory (ulimit -v, a limit of its container, or the machine is full)",
        "raise that limit, and check again",
    ),
    (
        ("too many open files",),
        "the limit on open files of this process",
        "raise it (ulimit -n), and check again",
    ),
    (
        ("busy or unavailable", "all cuda-capable devices"),
        "another process has the GPU to itself (compute mode EXCLUSIVE_PROCESS), or the GPU has failed",
        "nvidia-smi -q -d COMPUTE, then check again",
    ),
    (
        (
            "no cuda",
            "no hip",
            "no nvidia driver",
            "driver version is insufficient",
            "not compiled with",
            "kernel image",
        ),
        "this torch and this driver or GPU do not fit together",
        "uccl-ep doctor, then a build of torch for this driver and GPU",
    ),
    (
        ("python.h", "gcc", "clang", "c compiler", "calledprocesserror"),
        "Triton finds no C compiler, or no headers of Python",
        "uccl-ep doctor names what is missing",
    ),
    (
        ("ptxas", "compilationerror", "passmanager", "llvm", "outofresources", "unsupported"),
        "this version of Triton does not compile the kernel for this GPU",
        f"another version of Triton (with the torch that brings it), or {REPORT}",
    ),
    (
        ("illegal", "misaligned", "launch failure", "unspecified", "has failed", "device-side", "memory access fault"),
        _DEFECT,
        REPORT,
    ),
)


class Wrong(Exception):
    """A check has found something else than it must.

    Args:
        where: the kernel, or the call of the driver.
        expected, found: in words.
        cause, step: where they are known better than from the words.
    """

    def __init__(self, where: str, expected: str, found: str, cause: str = _DEFECT, step: str = REPORT) -> None:
        super().__init__(f"{where}: expected {expected}, found {found}")
        self.fault = Fault(where, expected, found, cause, step)


@dataclass(frozen=True)
class Fault:
    """Why a part has not passed.

    Attributes:
        where: the kernel, or the call of the driver.
        blames: what raised it says that another rank is to blame.
        trace: of Python.
    """

    where: str
    expected: str
    found: str
    cause: str
    step: str
    blames: bool = False
    trace: str = ""

    def __str__(self) -> str:
        return (
            f"{self.where}: expected {self.expected}; found {self.found}. Likely cause: {self.cause}. "
            f"Next step: {self.step}"
        )

    @property
    def lines(self) -> str:
        """The same for a report, a line each behind the first, which says where."""
        return (
            f"{self.where}\n  expected: {self.expected}\n  found: {self.found}\n  likely cause: {self.cause}\n"
            f"  next step: {self.step}"
        )


def expect(true: object, where: str, expected: str, found: object) -> None:
    """Raise :class:`Wrong` unless ``true``."""
    if not true:
        raise Wrong(where, expected, str(found))


def of(error: BaseException, where: str) -> Fault:
    """What ``error`` says, which was raised at ``where``."""
    trace = "".join(traceback.format_exception(error))
    if isinstance(error, Wrong):
        return replace(error.fault, trace=trace)
    lines = [line for line in str(error).strip().splitlines() if line.strip()] or [""]
    # of a long text the first line says what failed, or the last (a compiler's) does
    said = f"{type(error).__name__}: {' '.join(lines) if len(lines) < 4 else f'{lines[0]} ... {lines[-1]}'}"[:600]
    text = f"{type(error).__name__} {error}".lower()
    found, _, rest = said.partition(" Likely cause: ")
    cause, _, step = rest.partition(" Next step: ")
    if not cause:
        found, _, step = said.partition(" Next step: ")
    for words, known, known_step in _CAUSES:
        if any(word in text for word in words):
            cause, step = cause or known, step or known_step
            break
    if isinstance(error, ConfigError):
        cause, step = cause or "a setting that is not right here", step or "correct or unset it"
    # its store is rank 0's: where it fails, that rank has ended
    blames = isinstance(error, PeerError) or (isinstance(error, BootstrapError) and "the store of the" in said)
    fallback = "the other rank, which shows it elsewhere" if blames else "not known"
    cause, step = cause.rstrip(".") or fallback, step.rstrip(".") or REPORT
    return Fault(where, "no error", found.rstrip("."), cause, step, blames, trace)


def died(status: int | None, where: str, compiles: bool = False, gpu: bool = True) -> Fault:
    """A process has ended by itself, which used the GPU (``gpu``) or else ``compiles``."""
    how = f"ended with status {status}"
    if status is not None and status < 0:
        try:
            how = f"was ended by {signal.Signals(-status).name}"
        except ValueError:
            how = f"was ended by signal {-status}"
    killed = status == -signal.SIGKILL
    cause = "the system was out of memory, or somebody ended it" if killed else f"{_DEFECT}, or of the driver"
    step = "dmesg; then check again" if killed else f"dmesg (NVIDIA: lines with Xid); {REPORT}"
    if not gpu and not killed:
        cause, step = "not known: see what it said", "uccl-ep doctor; then check again"
    elif compiles and not killed:
        cause, step = "Triton's compiler has crashed on it", f"another version of Triton, or {REPORT}"
    return Fault(where, "the process goes on", f"it {how}", cause, step)


def late(seconds: float, where: str) -> Fault:
    """Something on the GPU has not ended in time."""
    cause = "it waits for a write that never shows, or other work holds the GPU"
    step = f"nvidia-smi (or rocm-smi) shows who uses the GPU; check again when it is idle, then {REPORT}"
    return Fault(where, f"an end within {seconds:.0f} s", "none; its process was ended", cause, step)


def slow(where: str) -> Fault:
    """The limit of all parts is over, because compiling took long."""
    cause = "cold caches of compiled code, and few or slow cores"
    step = "uccl-ep check --gpu once more, with --seconds 600: what has been compiled is kept"
    return Fault(where, "an end within the limit of all parts", "none", cause, step)
