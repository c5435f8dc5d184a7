"""Memory between pages that nobody may touch: a write outside of it ends the process at once."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np

__all__ = ["CANARY_BYTES", "Guarded"]

#: Before and after: more than any length or offset of 32 bits reaches. Address space only, no memory.
_GUARD_BYTES = 1 << 33
#: Bytes on either side that can be written and must not be: a write just outside is found as one, not as a crash.
CANARY_BYTES = 4096

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_NO_ACCESS, _NO_RESERVE = 0, 0x4000  # PROT_NONE, MAP_NORESERVE


class Guarded:
    """``nbytes`` of zeros with canaries and guard pages around them; unmapped with the object.

    Attributes:
        address: of the first byte.
        whole: address of the canary before it; ``whole_bytes`` with both canaries.
    """

    def __init__(self, nbytes: int, canary: int = CANARY_BYTES) -> None:
        assert nbytes % mmap.PAGESIZE == canary % mmap.PAGESIZE == 0
        self.nbytes, self.whole_bytes = nbytes, nbytes + 2 * canary
        self._length = self.whole_bytes + 2 * _GUARD_BYTES
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
        self._base = _libc.mmap(None, self._length, _NO_ACCESS, flags, -1, 0)
        if self._base in (None, ctypes.c_void_p(-1).value):
            raise MemoryError(f"no room for {self._length} bytes of addresses")
        self.whole = self._base + _GUARD_BYTES
        self.address = self.whole + canary
        assert _libc.mprotect(self.whole, self.whole_bytes, mmap.PROT_READ | mmap.PROT_WRITE) == 0

    def array(self) -> np.ndarray:
        """All that can be written, canaries included."""
        return np.ctypeslib.as_array((ctypes.c_uint8 * self.whole_bytes).from_address(self.whole))

    def __del__(self) -> None:
        _libc.munmap(self._base, self._length)
