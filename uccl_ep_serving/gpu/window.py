"""The kernel space as kernels on a device see it: a copy of its tables in device memory, with the device's addresses.

Two kinds of window. ``host``: the window of :class:`KernelSpace`, pinned and mapped into the GPU, so that every
transport reaches it. ``device``: a twin of it in GPU memory with the same layout. Peers on this host map it (CUDA IPC)
and write directly, with the flags in GPU memory as well; others need NICs that reach GPU memory, and the counts of what
they sent stay where the proxies publish them, in host memory.

Where NICs reach host memory only, there are both. The messages of ranks of one host land in the twin; what comes over
proxies lands in host memory, and so does what is packed for them.
"""

from __future__ import annotations

import bisect
import ctypes
import logging
import mmap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from ..data_plane.kernel_space import KernelSpace
from ..errors import ProtocolError, TransportError, in_words
from ..native.failure import failure_code
from ..native.pages import own_pages
from ..protocol import context as ctx
from ..protocol.layout import WindowLayout
from ..protocol.ring import CAPACITY, TAIL, ring_bytes
from ..protocol.streams import CREDIT, STREAMS
from .memory import DeviceMemory

__all__ = ["DeviceSpace", "DeviceWindow"]

_I64 = npt.NDArray[np.int64]
_PAGE = mmap.PAGESIZE
_SHARING = "sharing device windows"
_RETURNING = "giving device windows back"
#: Seconds for a word to be written on a device that had nothing to do.
_FILL_SECONDS = 5.0
_log = logging.getLogger("uccl_ep_serving")


def _words(address: int, count: int) -> _I64:
    """int64 view of memory that the caller keeps alive."""
    return np.frombuffer(memoryview((ctypes.c_int64 * count).from_address(address)).cast("B"), dtype=np.int64)


class _HostPages:
    """Host memory mapped into the device, page by page, each page once."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        #: (start, end, start as the device sees it), ascending
        self._ranges: list[tuple[int, int, int]] = []

    def map(self, pieces: Iterable[tuple[int, int]]) -> None:
        """Map the pages of (address, bytes) pieces; what shares a page becomes one range."""
        for start, end in _merged(pieces):
            bisect.insort(self._ranges, (start, end, self._memory.map_host(start, end - start)))

    def __call__(self, address: int) -> int:
        """The device's address of a mapped host address; 0 stays 0."""
        if address == 0:
            return 0
        # tables of hundreds of ranks have thousands of addresses, in about as many pages
        at = bisect.bisect_right(self._ranges, address, key=lambda one: one[0]) - 1
        start, end, mapped = self._ranges[at] if at >= 0 else (0, 0, 0)
        assert start <= address < end, f"{address:#x} is not mapped into the device"
        return mapped + address - start

    def unmap(self, but: int = 0) -> None:
        """Undo all of :meth:`map`, except for the range of one address."""
        ranges, self._ranges = self._ranges, []
        for start, end, _ in reversed(ranges):
            if not start <= but < end:
                self._memory.unmap_host(start)


def _merged(pieces: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Page-aligned, disjoint [start, end) ranges that cover the pieces."""
    pages = sorted((address // _PAGE * _PAGE, -(-(address + nbytes) // _PAGE) * _PAGE) for address, nbytes in pieces)
    ranges: list[tuple[int, int]] = []
    for start, end in pages:
        if ranges and start < ranges[-1][1]:
            ranges[-1] = (ranges[-1][0], max(end, ranges[-1][1]))
        else:
            ranges.append((start, end))
    return ranges


class DeviceWindow:
    """This rank's window in device memory and those of peers on this host, opened.

    Args:
        memory: of this rank's device.
        layout: of the windows.
        rank: of this process.
        exchange: all-gather of bytes among the ranks, told the step's name; nothing from those that are masked.
        proxied: ranks whose windows are not opened: proxies reach them.
        near_only: a twin beside windows in host memory.

    Attributes:
        addresses: of the windows by rank, 0 for those that are not open.
        nbytes: of each.
        near_only: as given.

    Raises:
        TransportError: on every rank, when one of them cannot allocate its window or open a peer's.
    """

    def __init__(
        self,
        memory: DeviceMemory,
        layout: WindowLayout,
        rank: int,
        exchange: Callable[[str, bytes], list[bytes]],
        proxied: frozenset[int] = frozenset(),
        near_only: bool = False,
    ) -> None:
        self._memory = memory
        self._rank = rank
        self.near_only = near_only
        self.nbytes = layout.nbytes
        self.own = 0
        self.addresses = [0] * layout.ranks
        objection, handle = "", b""
        try:
            self.own = self.addresses[rank] = memory.allocate(self.nbytes)
            handle = memory.export(self.own)
        # whatever the driver's bindings raise: the others wait
        except Exception as error:
            objection = in_words(error)
        try:
            handles = _agree(exchange, objection, handle)
            try:
                for peer, one in enumerate(handles):
                    if peer != rank and one and peer not in proxied:
                        self.addresses[peer] = memory.open(one)
            except Exception as error:
                objection = in_words(error)
            try:
                _agree(exchange, objection, b"")
            except TransportError:
                self.give_back(exchange)
                raise
        except TransportError:
            self.close()
            raise
        except BaseException:
            # the ranks are in different steps: a peer may have it open
            self.own = 0
            self.close()
            raise

    def give_back(self, exchange: Callable[[str, bytes], list[bytes]]) -> None:
        """Close what was opened, and free the own window once nobody has it open. Collective: every rank takes part,
        whatever becomes of its own. Where one could not close what it opened, nobody frees anything."""
        objections = exchange(_RETURNING, self._close_peers().encode())
        if any(objections):
            # the manual of cudaIpcOpenMemHandle calls it undefined to free what is open
            self.own = 0
            _log.error("%s: %s. Their memory stays until these processes end", _RETURNING, _named(objections))
        self.close()

    def _close_peers(self) -> str:
        """Close what was opened, each whatever becomes of the others; what failed, in words."""
        failures = []
        for peer, address in enumerate(self.addresses):
            if address and peer != self._rank:
                self.addresses[peer] = 0
                try:
                    self._memory.close(address)
                except Exception as error:
                    failures.append(f"closing the window of rank {peer}: {in_words(error)}")
        return "; ".join(failures)

    def close(self) -> None:
        """Close what was opened, free the own window. The ranks have agreed that nobody uses it any more. Never raises:
        what cannot be let go of is logged, and stays until this process ends."""
        failures = self._close_peers()
        self.addresses = []
        own, self.own = self.own, 0
        try:
            if own:
                self._memory.free(own)
        except Exception as error:
            failures = f"{failures}; {in_words(error)}".lstrip("; ")
        if failures:
            _log.error("%s. Its memory stays until this process ends", failures)


def _agree(exchange: Callable[[str, bytes], list[bytes]], objection: str, payload: bytes) -> list[bytes]:
    """What every rank gave, empty for masked ones. Raises TransportError on every rank when one objects."""
    answers = exchange(_SHARING, msgspec.msgpack.encode((objection, payload)))
    given: list[bytes] = []
    for peer, answer in enumerate(answers):
        try:
            refusal, content = msgspec.msgpack.decode(answer, type=tuple[str, bytes]) if answer else ("", b"")
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"{_SHARING}: rank {peer} sent something that is no answer: {error}") from error
        if refusal:
            raise TransportError(f"{_SHARING}: rank {peer}: {refusal}", device="memory of the GPUs")
        given.append(content)
    return given


def _named(answers: Sequence[bytes]) -> str:
    """What ranks gave, with their names; nothing of those that gave nothing."""
    return "; ".join(f"rank {rank}: {text.decode(errors='replace')}" for rank, text in enumerate(answers) if text)


class _Tables(NamedTuple):
    """Where kernels find windows and counts, as the device sees them.

    Attributes:
        own: the window that proxies read.
        landing, windows: by rank: where its messages land, and its window where kernels write it.
        arrived, completed, flags: by rank and stream.
    """

    own: int
    landing: _I64
    windows: _I64
    arrived: _I64
    completed: _I64
    flags: _I64


class DeviceSpace:
    """Tables, counters and windows of one epoch, for kernels on a device.

    Args:
        space: the host's; its memory stays where it is until :meth:`close` has returned.
        memory: of the device.
        window: the device windows, or None for windows in host memory. They are closed after this object.

    Attributes:
        context: address, in device memory, of the context block.
    """

    def __init__(self, space: KernelSpace, memory: DeviceMemory, window: DeviceWindow | None) -> None:
        self._space = space
        self._memory = memory
        self._window = window
        self._pages = _HostPages(memory)
        self._tensors: list[torch.Tensor] = []
        #: 1 once a kernel has failed; kernels of this rank write it and read it.
        self._verdict = torch.zeros(1, dtype=torch.int64, device=memory.device)
        self._report: _I64 = own_pages(8 * ctx.ERROR_WORDS).view(np.int64)
        #: The same words, for what the host reads before every operation: they take a third of the time here.
        self._glance = self._report.data
        try:
            self.context = self._build()
        except BaseException:
            self._pages.unmap()
            raise

    def _on_device(self, values: npt.NDArray[np.int64] | npt.NDArray[np.int32]) -> int:
        """Address of a copy in device memory, kept as long as this object."""
        tensor = torch.from_numpy(np.array(values)).to(self._memory.device)
        if self._memory.device.type == "cpu":
            tensor = tensor.clone()
        self._tensors.append(tensor)
        return tensor.data_ptr()

    def _build(self) -> int:
        space, layout = self._space, self._space.layout
        words = _words(space.context, ctx.CONTEXT_WORDS)
        rings = _words(int(words[ctx.RING]), STREAMS).copy()
        arrived, completed, flags = (
            _words(int(words[word]), space.ranks * STREAMS).reshape(space.ranks, STREAMS)
            for word in (ctx.ARRIVED, ctx.COMPLETED, ctx.FLAG)
        )
        windows = _words(int(words[ctx.PEER_WINDOW]), space.ranks)
        pieces = [(int(address), 8) for address in np.unique(np.concatenate([arrived, completed])) if address]
        pieces += [
            (int(ring), ring_bytes(int(_words(int(ring) + CAPACITY, 1)[0]))) for ring in np.unique(rings) if ring
        ]
        pieces += [(space.error, 8 * ctx.ERROR_WORDS), (self._report.ctypes.data, 8 * ctx.ERROR_WORDS)]
        if self._window is None:
            pieces += [(int(address), layout.nbytes) for address in windows if address]
        elif self._window.near_only:
            # kernels write those of neighbours in device memory
            pieces.append((space.window, layout.nbytes))
        self._pages.map(pieces)
        device = np.vectorize(self._pages, otypes=[np.int64])
        common = {
            ctx.RANK: space.rank,
            ctx.RANKS: space.ranks,
            ctx.CHANNELS: int(words[ctx.CHANNELS]),
            ctx.WINDOW_BYTES: layout.nbytes,
            ctx.RING: self._on_device(device(rings)),
            # constant: masking a rank begins a new epoch
            ctx.MASK: self._on_device(np.array(space.mask)),
            ctx.ERROR: self._pages(space.error),
            ctx.VERDICT: self._verdict.data_ptr(),
            ctx.REPORT: self._pages(self._report.ctypes.data),
            ctx.HEADS: self._on_device(self._heads(rings)),
            ctx.LIMIT: int(space.timeout * 1e9),
        }
        if self._window is None:
            own = self._pages(space.window)
            landing = np.full(space.ranks, own)
            mapped = device(windows)
            tables = _Tables(own, landing, mapped, device(arrived), device(completed), device(flags))
            return self._block(common, tables)
        tables = self._over(self._window, device(arrived), device(completed))
        if self._window.near_only:
            own = self._pages(space.window)
            landing = np.where(tables.windows != 0, tables.own, own)
            tables = tables._replace(own=own, landing=landing)
        return self._block(common, tables)

    def _over(self, window: DeviceWindow, arrived: _I64, completed: _I64) -> _Tables:
        """Tables over device windows; ``arrived`` and ``completed``: where proxies publish counts of whom they
        reach."""
        flags_at, ranks = self._space.layout.direct_flags, self._space.ranks
        windows = np.array(window.addresses, dtype=np.int64)
        # by peer: kernels write its window themselves, or proxies publish counts in host memory
        mapped = windows[:, None] != 0
        streams, peers = np.arange(STREAMS), np.arange(ranks)[:, None]
        return _Tables(
            window.own,
            np.full(ranks, window.own),
            windows,
            np.where(mapped, window.own + flags_at + 8 * (peers * STREAMS + streams), arrived),
            np.where(mapped, 0, completed),
            np.where(mapped, windows[:, None] + flags_at + 8 * (self._space.rank * STREAMS + streams), 0),
        )

    def _block(self, common: Mapping[int, int], tables: _Tables) -> int:
        """Address of a context block."""
        context = np.zeros(ctx.CONTEXT_WORDS, dtype=np.int64)
        for word, value in common.items():
            context[word] = value
        context[ctx.WINDOW] = tables.own
        context[ctx.LANDING] = self._on_device(tables.landing)
        context[ctx.PEER_WINDOW] = self._on_device(tables.windows)
        context[ctx.ARRIVED] = self._on_device(tables.arrived.ravel())
        context[ctx.COMPLETED] = self._on_device(tables.completed.ravel())
        context[ctx.FLAG] = self._on_device(tables.flags.ravel())
        return self._on_device(context)

    def _heads(self, rings: _I64) -> _I64:
        """By stream: address of its ring's head, tail and capacity in device memory; streams that share a ring share
        them."""
        heads = np.zeros(STREAMS, dtype=np.int64)
        for ring in np.unique(rings[:CREDIT]):
            if ring:
                tail, capacity = (int(_words(int(ring) + word, 1)[0]) for word in (TAIL, CAPACITY))
                heads[rings == ring] = self._on_device(np.array([tail, tail, capacity], dtype=np.int64))
        return heads

    @property
    def own_window(self) -> int:
        """Address of this rank's window in device memory, 0 where there is none."""
        return 0 if self._window is None else self._window.own

    @property
    def all_mapped(self) -> bool:
        """True when kernels of normal mode write every peer's window themselves."""
        return self._space.all_direct if self._window is None else all(self._window.addresses)

    @property
    def on_device(self) -> bool:
        """True when windows lie in device memory, all of them."""
        return self._window is not None and not self._window.near_only

    def take_report(self) -> None:
        """Make a failure that a kernel has reported this rank's sticky error."""
        if self._glance[ctx.ERROR_CODE]:
            code = failure_code(self._report.ctypes.data)
            words = self._report[ctx.ERROR_PEER : ctx.ERROR_EXPECTED + 1]
            self._space.fail(code, *(int(word) for word in words))

    def take_ids(self) -> tuple[int, int] | None:
        """(position in topk_idx, number of experts) of an id out of range that a dispatch was given, told once."""
        told = self._glance[ctx.ERROR_IDS]
        if not told:
            return None
        self._report[ctx.ERROR_IDS] = 0
        return (told >> ctx.ERROR_IDS_SHIFT) - 1, told & ((1 << ctx.ERROR_IDS_SHIFT) - 1)

    def close(self, keep: Callable[..., bool] = lambda *memory: False) -> None:
        """Let go of all memory. The device has finished, or failed.

        Args:
            keep: told what kernels of captured graphs look at before anything else, makes it outlive this object, and
                returns True, where there are such graphs. A replay then finds that an earlier kernel has failed.
        """
        try:
            kept = keep(self._tensors, self._verdict, self._report)
            if kept:
                self._verdict.fill_(1)
                if not self._memory.synchronize(time.monotonic() + _FILL_SECONDS):
                    raise TransportError("the GPU has not finished what it was given meanwhile")
            self._pages.unmap(but=self._report.ctypes.data if kept else 0)
        except RuntimeError as error:  # torch's where the device has failed, and our own, which are some
            _log.error("%s. What was mapped stays until this process ends", error)
        self._tensors = []
