"""Messages that two ranks write into each other's windows, through proxies or directly: timed and verified."""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ..data_plane.kernel_space import KernelSpace
from ..errors import TransportError
from .turns import PLACES, STATE_WORDS, send_burst, take_turns

__all__ = ["LARGE", "LONGEST", "WINDOW_BYTES", "Measured", "Wire", "device_bytes", "rounds", "size_words"]


def size_words(nbytes: int) -> str:
    """Bytes, or whole MiB, in words."""
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes} B"


#: Bytes of a message: no payload, the least that a command carries (its unit), a block of rows.
_NOTHING, _LITTLE, LONGEST = 0, 16, 1 << 20
#: What is tried with the last of these, as it is told.
LARGE = f"messages of {size_words(LONGEST)}"
#: Turns that are timed, and before them; messages of a burst.
_TURNS, _WARM_UP, _BURST = 100, 8, 64
#: Of the heap of a window: what is sent, and the places where it lands.
WINDOW_BYTES = (1 + PLACES) * LONGEST


class Measured(NamedTuple):
    """What went between two ranks, every byte of it right.

    Attributes:
        empty_us, little_us: one way, half of the median of the turns: a message without payload, and one of 16 bytes.
        gbytes: 1e9 bytes per second of the longest messages, from the first of a burst to the answer to the last.
    """

    empty_us: float
    little_us: float
    gbytes: float


class WrongBytes(TransportError):
    """A message has arrived whose bytes are not those that were sent."""


class Wire:
    """One rank's end of the messages to all others, over one data plane.

    Args:
        space: of the data plane, whose heap has room for :data:`WINDOW_BYTES`.
        window: uint8 tensor over the window's bytes, in whichever memory NICs and kernels read and write them.
    """

    def __init__(self, space: KernelSpace, window: torch.Tensor) -> None:
        self._space, self._window = space, window
        offset = space.heap.take(WINDOW_BYTES)
        assert offset is not None, "the heap of this window is too small"
        # the same on every rank: nothing else has taken any of these heaps
        self._source, self._target = offset, offset + LONGEST
        self._state = np.zeros((space.ranks, STATE_WORDS), dtype=np.int64)

    def measure(self, peer: int, say: Callable[[str], None] = lambda words: None) -> Measured:
        """Both ranks call this, each with the other; ``say`` is told what is being tried.

        Raises:
            PeerTimeout, PeerLost, TransportError, ProtocolError, ProxyDied: as an operation would.
        """
        found = []
        for nbytes, words in ((_NOTHING, "messages without payload"), (_LITTLE, f"messages of {_LITTLE} bytes")):
            say(words)
            found.append(self._turns(peer, nbytes))
        say(LARGE)
        self._turns(peer, LONGEST, 1)
        rates = [self._burst(peer, sender == self._space.rank) for sender in sorted((peer, self._space.rank))]
        return Measured(found[0], found[1], max(rates))

    def _turns(self, peer: int, nbytes: int, times: int = _TURNS) -> float:
        """Microseconds of one way."""
        samples = []
        with self._verified(peer, nbytes, 1):
            for turn in range(_WARM_UP + times):
                begun = time.perf_counter()
                self._step(peer, nbytes, 1, 1)
                if turn >= _WARM_UP:
                    samples.append(time.perf_counter() - begun)
        # of the rank that sends first a turn is there and back; of the other one from answer to answer, as long
        return float(np.median(samples)) / 2 * 1e6

    def _burst(self, peer: int, sends: bool) -> float:
        """1e9 bytes per second of the rank that sends: of messages, until the answer to the last is there."""
        space, state = self._space, self._state[peer]
        with self._verified(peer, LONGEST, 0 if sends else PLACES):
            if not sends:
                self._step(peer, 0, 0, _BURST)
                self._step(peer, 0, 1, 0)
                return 0.0
            begun = time.perf_counter()
            state[2] += _BURST
            arguments = space.context, state.ctypes.data, peer, self._source, self._target, LONGEST
            space.wait(f"check: a burst to rank {peer}", lambda _: send_burst(*arguments), self._moved(peer))
            self._step(peer, 0, 0, 1)
            return _BURST * LONGEST / (time.perf_counter() - begun) / 1e9

    def _step(self, peer: int, nbytes: int, send: int, receive: int) -> None:
        space, state = self._space, self._state[peer]
        state[2:] = state[0] + send, state[1] + receive, space.rank < peer
        arguments = space.context, space.progress, state.ctypes.data, peer, self._source, self._target, nbytes
        words = f"check: messages of {nbytes} bytes with rank {peer}"
        space.wait(words, lambda end: take_turns(*arguments, end), self._moved(peer))

    def _moved(self, peer: int) -> Callable[[], int]:
        """How many messages have gone both ways: the deadline bounds silence."""
        return lambda: int(self._state[peer, 0] + self._state[peer, 1])

    @contextlib.contextmanager
    def _verified(self, peer: int, nbytes: int, places: int) -> Iterator[None]:
        """What arrives inside are ``places`` x ``nbytes`` bytes of ``peer``'s."""
        self._window[self._source : self._source + LONGEST] = torch.from_numpy(_bytes_of(self._space.rank))
        landing = self._window[self._target : self._target + places * nbytes]
        landing.zero_()
        if landing.is_cuda:
            torch.cuda.synchronize(landing.device)
        # both are ready
        self._step(peer, 0, 1, 1)
        yield
        arrived = landing.cpu().numpy()
        for place in range(places):
            here = arrived[place * nbytes : (place + 1) * nbytes]
            wrong = np.flatnonzero(here != _bytes_of(peer)[:nbytes])
            if len(wrong):
                at = int(wrong[0])
                raise WrongBytes(
                    f"{len(wrong)} of {nbytes} bytes that rank {peer} wrote are not what it sent; the first at byte "
                    f"{at}: expected {_bytes_of(peer)[at]}, found {here[at]}. Likely cause: a write is reported before "
                    "its bytes are there, or a NIC or cable is faulty. Next step: take the NIC out with UCCL_EP_NICS"
                )


def _bytes_of(rank: int) -> npt.NDArray[np.uint8]:
    """What a rank sends: no two places within a block, and no two ranks, have the same run of bytes."""
    counted = np.arange(LONGEST, dtype=np.uint32)
    return ((counted * 2654435761 + (rank + 1) * 40503) >> 13).astype(np.uint8)


def rounds(ranks: int) -> list[list[tuple[int, int]]]:
    """All pairs of ranks, in rounds in which no rank has two peers: a circle of which one rank stays in its place."""
    circle: list[int | None] = [*range(ranks), *([None] if ranks % 2 else [])]
    found = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        found.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        circle[1:] = [circle[-1], *circle[1:-1]]
    return found


def device_bytes(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """uint8 tensor over a window in device memory, in whose life it is used."""
    if device.type == "cpu":
        return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)

    class Window:
        __cuda_array_interface__: ClassVar[dict[str, Any]] = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip

    return torch.as_tensor(Window(), device=device)
