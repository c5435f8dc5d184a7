"""Windows: shared segments that peers map, and the heap from which received rows are leased.

A segment is an anonymous ``memfd``: it has no name in any file system, so nothing is left behind when its owner is
killed, it is readable by nobody who was not handed the descriptor, and a small ``/dev/shm`` does not limit it. Pages
are committed when they are first touched, so a worst-case region costs address space only.
"""

from __future__ import annotations

import bisect
import collections
import ctypes
import errno
import fcntl
import mmap
import os
import platform
import weakref

import numpy as np
import numpy.typing as npt
import torch

from ..errors import ConfigError, TransportError
from ..native import descriptors

__all__ = ["HeapAllocator", "Segment"]

Bytes = npt.NDArray[np.uint8]


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.syscall.restype = ctypes.c_long
_MAP_FAILED = ctypes.c_void_p(-1).value


def _map(fd: int, nbytes: int) -> Bytes:
    """The ``nbytes`` bytes of ``fd``, shared, unmapped with the last array or tensor over them. Raises OSError.

    The module ``mmap`` would keep a duplicate of the descriptor for as long as the mapping lives (until Python 3.13),
    two for each peer on the host.
    """
    if nbytes <= 0:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    address = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
    if address == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    block = (ctypes.c_uint8 * nbytes).from_address(address)
    # Not at exit: daemon threads may still be running in it.
    weakref.finalize(block, _libc.munmap, address, nbytes).atexit = False
    return np.frombuffer(memoryview(block), dtype=np.uint8)


#: Bytes of a huge page, and memfd_create's words for it.
_HUGE = 2 << 20
_MFD_HUGE = 0x4 | 21 << 26
#: mbind(2): its number, which differs by machine; MPOL_PREFERRED, which falls back to other nodes.
_SYS_MBIND = {"x86_64": 237, "aarch64": 235}.get(platform.machine(), -1)
_MPOL_PREFERRED = 1
_NODE_BITS = 1024


def _prefer_node(address: int, nbytes: int, node: int) -> bool:
    """Have pages that are not there yet come from NUMA ``node`` while it has any; False where that is not allowed (a
    container's seccomp profile) or there is no such node."""
    mask = (ctypes.c_uint64 * (_NODE_BITS // 64))()
    if not 0 <= node < _NODE_BITS - 1:
        return False
    mask[node // 64] = 1 << node % 64
    arguments = (address, nbytes, _MPOL_PREFERRED, ctypes.addressof(mask), _NODE_BITS, 0)
    return bool(_libc.syscall(ctypes.c_long(_SYS_MBIND), *map(ctypes.c_ulong, arguments)) == 0)


class Segment:
    """A shared memory segment mapped into this process.

    Attributes:
        nbytes: length.
        pages: what it was asked to be made of and is, in words; "" for ordinary pages of any node.
        address: where it is mapped; valid while ``bytes`` or any array or tensor derived from it lives.
        bytes: uint8 array over the whole segment.
        fd: descriptor to hand to peers, -1 once closed.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self.fd = fd
        self.pages = ""
        try:
            # whole pages, which may be huge: no others can be unmapped
            grain = os.fstat(fd).st_blksize
            self.bytes: Bytes = _map(fd, -(-nbytes // grain) * grain)[:nbytes]
        except OSError as error:
            os.close(fd)
            raise TransportError(
                f"cannot map a shared segment of {nbytes} bytes: {error}. Lower UCCL_EP_HEAP_BYTES or raise the "
                "address-space limit (ulimit -v)",
                device="memfd",
                errno=error.errno or 0,
            ) from error
        self.address: int = self.bytes.ctypes.data

    @classmethod
    def create(cls, name: str, nbytes: int, huge: bool = False, node: int = -1) -> Segment:
        """A new zeroed segment; ``name`` shows in /proc/<pid>/maps.

        Args:
            huge: of huge pages, where the system has set enough of them aside, all committed now; else of ordinary
                ones, which it may make huge. For what a device pins as a whole.
            node: NUMA node whose memory is preferred, -1 = any.

        Raises:
            TransportError: memory is refused.
        """
        if huge and (made := cls._of_huge_pages(name, nbytes, node)) is not None:
            return made
        made = cls._new(name, nbytes)
        if huge:
            # as /sys/kernel/mm/transparent_hugepage/shmem_enabled has it: nothing by default
            _libc.madvise(made.address, nbytes, mmap.MADV_HUGEPAGE)
        if node >= 0 and _prefer_node(made.address, nbytes, node):
            made.pages = f"on NUMA node {node}"
        return made

    @classmethod
    def _of_huge_pages(cls, name: str, nbytes: int, node: int) -> Segment | None:
        """The same of huge pages; None where there are too few."""
        try:
            made = cls._new(name, nbytes, _MFD_HUGE)
        except TransportError:
            return None
        whole = -(-nbytes // _HUGE) * _HUGE
        bound = node >= 0 and _prefer_node(made.address, whole, node)
        try:
            # Now: a container may have fewer than the system, and a first touch would then be fatal (SIGBUS).
            os.posix_fallocate(made.fd, 0, whole)
        except OSError:
            made.close()
            return None
        made.pages = "of 2 MiB pages" + (f" on NUMA node {node}" if bound else "")
        return made

    @classmethod
    def _new(cls, name: str, nbytes: int, flags: int = 0) -> Segment:
        fd = -1
        try:
            fd = descriptors.memfd(name, flags)
            os.ftruncate(fd, -(-nbytes // _HUGE) * _HUGE if flags else nbytes)
            # Touching a page beyond the end is fatal (SIGBUS): nobody may shorten it, neither we nor who maps it.
            seals = descriptors.F_SEAL_SHRINK | descriptors.F_SEAL_GROW | descriptors.F_SEAL_SEAL
            fcntl.fcntl(fd, descriptors.F_ADD_SEALS, seals)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            raise TransportError(
                f"cannot make a shared segment of {nbytes} bytes: {error}. Next step: {_step(error)}",
                device="memfd",
                errno=error.errno or 0,
            ) from error
        return cls(fd, nbytes)

    @classmethod
    def attach(cls, fd: int, nbytes: int) -> Segment:
        """Map a peer's segment from a descriptor received from it (taken over).

        Raises ConfigError when the descriptor is shorter than ``nbytes`` or could still be shortened: a write beyond
        its end would be fatal.
        """
        try:
            actual = os.fstat(fd).st_size
            sealed = fcntl.fcntl(fd, descriptors.F_GET_SEALS) & descriptors.F_SEAL_SHRINK
        except OSError:
            sealed = 0  # no memfd at all
        if not sealed or actual < nbytes:
            os.close(fd)
            if sealed:
                raise ConfigError(f"the peer's segment has {actual} bytes where {nbytes} were agreed")
            raise ConfigError("the peer's segment is not sealed: it could be shortened under this rank")
        return cls(fd, nbytes)

    def forget(self) -> None:
        """Give the memory back to the system: who reads it from now on finds zeros. For what nobody uses any more."""
        _libc.madvise(self.address, self.nbytes, mmap.MADV_REMOVE)

    def close_descriptor(self) -> None:
        """Close the descriptor; the mapping stays."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def close(self) -> None:
        """Give up this object's hold. Memory is unmapped when the last array or tensor over it is gone."""
        self.close_descriptor()
        self.bytes = np.empty(0, dtype=np.uint8)


class _Lease(weakref.ref[Bytes]):
    """The range below a tensor, which returns to the heap when the array that the tensor is made of is collected.

    Every operation makes one, and ``weakref.finalize`` takes ten times as long. It knows the lists of its heap and not
    the heap itself: that cycle would keep the window mapped.

    Attributes:
        place: offset and bytes.
        held: the heap's leases by offset. returned: where the place goes.
    """

    __slots__ = ("held", "place", "returned")

    place: tuple[int, int]
    held: dict[int, _Lease]
    returned: collections.deque[tuple[int, int]]


def _end(lease: _Lease) -> None:
    """Called once, in whatever thread collects the array. Each step is atomic; after the second the range may be leased
    anew."""
    del lease.held[lease.place[0]]
    lease.returned.append(lease.place)


def _step(error: OSError) -> str:
    """What to do where the system gives no shared memory."""
    if error.errno in (errno.EPERM, errno.EACCES, errno.ENOSYS):
        return "allow memfd_create in the container's seccomp profile, or in the sandbox"
    if error.errno == errno.EFBIG:
        return "raise the limit on the size of files (ulimit -f)"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return "raise the limit on open files (ulimit -n)"
    return "raise the memory limit of the container, or the limit on open files (ulimit -n)"


class HeapAllocator:
    """First-fit allocator over a byte range of a window; ranges are leased to tensors.

    One host thread takes; leases end in whatever thread collects the tensor, so a returned range only lands in a deque
    (atomic append) and is merged by the next :meth:`take`.
    """

    GRAIN = 128

    def __init__(self, window: Bytes, offset: int, nbytes: int) -> None:
        self._window = window
        self._free: list[tuple[int, int]] = [(offset, nbytes // self.GRAIN * self.GRAIN)] if nbytes else []
        self._returned: collections.deque[tuple[int, int]] = collections.deque()
        self._taken: dict[int, int] = {}
        self._leases: dict[int, _Lease] = {}

    def take(self, nbytes: int) -> int | None:
        """Window offset of a free range of ``nbytes`` (rounded up to 128), or None when there is no room."""
        self._merge_returned()
        need = max(-(-nbytes // self.GRAIN), 1) * self.GRAIN
        for index, (start, length) in enumerate(self._free):
            if length >= need:
                if length == need:
                    del self._free[index]
                else:
                    self._free[index] = (start + need, length - need)
                self._taken[start] = need
                return start
        return None

    def give(self, offset: int) -> None:
        """Return a range that :meth:`take` handed out and that no tensor was made of."""
        self._returned.append((offset, self._taken.pop(offset)))

    def tensor(self, offset: int, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """[rows, columns] of ``dtype``, neither of them 0, over a taken range, which returns to the heap when the
        tensor's storage is collected."""
        # torch keeps exactly this array object alive for as long as any tensor shares the storage.
        array = self._window[offset : offset + rows * columns * dtype.itemsize]
        lease = _Lease(array, _end)
        lease.place, lease.held, lease.returned = (offset, self._taken.pop(offset)), self._leases, self._returned
        self._leases[offset] = lease
        return torch.frombuffer(array, dtype=dtype).view(rows, columns)

    @property
    def free_bytes(self) -> int:
        """Bytes not leased (maybe in several ranges)."""
        self._merge_returned()
        return sum(length for _, length in self._free)

    def _merge_returned(self) -> None:
        while self._returned:
            start, length = self._returned.popleft()
            at = bisect.bisect(self._free, (start, length))
            if at < len(self._free) and self._free[at][0] == start + length:
                length += self._free.pop(at)[1]
            if at and sum(self._free[at - 1]) == start:
                start, before = self._free[at - 1][0], self._free.pop(at - 1)[1]
                length += before
                at -= 1
            self._free.insert(at, (start, length))
