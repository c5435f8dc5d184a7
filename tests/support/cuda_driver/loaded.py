"""The stub inside the process that has loaded it: its record, its faults, and calls as torch makes them."""

from __future__ import annotations

import ctypes
from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

__all__ = ["Call", "Driver", "Launched", "calls_of"]

_LAUNCH = "cuLaunchKernelEx"


class Call(NamedTuple):
    """A line of the record: the function, and its arguments as the stub's sources describe them."""

    function: str
    arguments: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Launched:
    """A launch as the driver was told of it.

    Attributes:
        kernel: name in the cubin.
        grid, block: x, y, z.
        shared: bytes of dynamic shared memory.
        stream: handle.
        parameters: (bytes, value) of each, in the order and the width that the cubin says; integers without a sign.
    """

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int
    stream: int
    parameters: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, call: Call) -> Launched:
        """What a recorded call of cuLaunchKernelEx says."""
        kernel, *rest = call.arguments
        x, y, z, bx, by, bz, shared = map(int, rest[:7])
        stream = 0 if rest[7] == "(nil)" else int(rest[7], 16)
        parts = (one.split(":") for one in rest[8:])
        parameters = tuple((int(size), int.from_bytes(bytes.fromhex(value), "little")) for size, value in parts)
        return cls(kernel, (x, y, z), (bx, by, bz), shared, stream, parameters)


def calls_of(record: str) -> list[Call]:
    """The lines of a record."""
    return [Call(name, tuple(arguments)) for name, *arguments in map(str.split, record.splitlines())]


class Driver:
    """The process's driver, which is the stub."""

    def __init__(self) -> None:
        self._library: Any = ctypes.CDLL("libcuda.so.1")
        self._library.stubRecord.restype = ctypes.c_char_p

    @property
    def calls(self) -> list[Call]:
        """Everything since the last :meth:`forget`."""
        return calls_of(self._library.stubRecord().decode())

    @property
    def launched(self) -> list[Launched]:
        """The launches among them."""
        return [Launched.of(call) for call in self.calls if call.function == _LAUNCH]

    @property
    def counts(self) -> dict[str, int]:
        """How often each function was called."""
        return dict(Counter(call.function for call in self.calls))

    def forget(self) -> None:
        """Begin a new record."""
        self._library.stubForget()

    def record(self, on: bool) -> None:
        """Whether calls are recorded, which takes the stub longer than anything else it does."""
        self._library.stubRecording(int(on))

    def fail(self, function: str, code: int) -> None:
        """Have ``function`` end with ``code`` from now on. 700 and 719, faults of kernels, lose the context, so that
        every call ends with them from then on."""
        self._library.stubFault(function.encode(), code)

    def mend(self) -> None:
        """Undo :meth:`fail`, as a new process would."""
        self._library.stubFault(b"", 0)

    def call(self, function: str, *arguments: Any) -> None:
        """Call the driver. Raises RuntimeError as torch does, with the driver's own text."""
        code = getattr(self._library, function)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(text))
            raise RuntimeError(f"CUDA error: {(text.value or b'?').decode()}")

    def handle(self, function: str, *arguments: Any) -> int:
        """Call a function that hands something out through its first argument."""
        result = ctypes.c_uint64()
        self.call(function, ctypes.byref(result), *arguments)
        return result.value
