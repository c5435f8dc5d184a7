"""The proxies of one Buffer: their memory, their threads, and what became of them."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import os
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

from ..config import Settings
from ..errors import ConfigError, PeerLost, ProtocolError, ProxyDied, TransportError, UcclEpError
from ..native.background import start_thread
from ..native.failure import set_failure
from ..protocol.command import HIGH, LOW, UNIT
from ..protocol.context import FAILURE_PEER_LOST, FAILURE_PROTOCOL, FAILURE_PROXY_DIED
from ..protocol.streams import STREAMS, channel_of, name_of, proxy_of
from .control import acknowledge, read, request_forget, request_stop
from .faults import (
    FAULT_COMMAND_KIND,
    FAULT_CREDIT,
    FAULT_DOWN,
    FAULT_IMMEDIATE,
    FAULT_SEQUENCE,
    FAULT_SOURCE,
    FAULT_STREAM_OWNER,
    FAULT_WORDS,
)
from .loop import DIED, STOPPED, run, step, warm
from .state import (
    FAULT,
    FAULT_PEER,
    FAULT_STREAM,
    FAULT_VALUE,
    FAULTS,
    PEER_FAULT,
    PEER_FAULT_DETAIL,
    PEER_FAULT_STREAM,
    PEER_FAULT_VALUE,
    REFUSED,
    REFUSED_HIGH,
    REFUSED_INDEX,
    REFUSED_LOW,
    WINDOW_BYTES,
    ProxyState,
)
from .stats import in_flight, latencies, proxy_counters, stream_states
from .transport.base import (
    FAULT_BAD_FRAME,
    FAULT_NUMBER,
    FAULT_OUTSIDE_WINDOW,
    FAULT_TOO_LONG,
    FAULT_WRONG_SOURCE,
    Diagnosed,
    Endpoint,
)

__all__ = ["ProxyService"]

#: What was expected instead, for faults of a peer; ``detail`` as the loop noted it.
_EXPECTED = {
    FAULT_BAD_FRAME: "{detail:#x} was expected",
    FAULT_NUMBER: "{detail:#x} was expected",
    FAULT_TOO_LONG: "at most {detail:#x} bytes were expected",
    FAULT_OUTSIDE_WINDOW: "an offset of at most {detail:#x} was expected",
    FAULT_WRONG_SOURCE: "source rank {detail} was expected",
    FAULT_IMMEDIATE: "a word below 2**32 was expected",
    FAULT_SOURCE: "it names rank {detail}",
    FAULT_STREAM_OWNER: "it names rank {detail} and a stream that nobody here reads",
    FAULT_CREDIT: "fewer credits were expected",
    FAULT_SEQUENCE: "sequence {detail} was expected",
}

#: prctl(2) options.
_PR_SET_NAME, _PR_SET_TIMERSLACK = 15, 29
#: Cores from which on a loop may spin before it yields. With fewer, a spinning proxy takes the core that the rank it
#: serves would compute on (measured: three spinning loops on two cores are 67 times slower than yielding ones).
_CORES_TO_SPIN = 8
_SPINS = 200


class ProxyService:
    """All proxy threads of one rank.

    Args:
        rank, ranks: EP rank of this process and number of EP ranks.
        window, window_bytes: address and length of this rank's window.
        settings: sizes and caps; see :class:`~uccl_ep_serving.config.Settings`.
        error: address of the sticky error (:mod:`uccl_ep_serving.protocol.context`).
        endpoints: ``[proxy][k]``, connected. They must outlive :meth:`stop`.
        route: per peer, the index k of the endpoint that reaches it, -1 = not through a proxy.
        near_cpus: per proxy, cores near the NICs it drives: where it runs unless ``settings.proxy_cpus`` says
            otherwise; () or an empty set = anywhere.

    Raises:
        ConfigError: the arguments contradict each other or the capacity of the formats.

    Every method except :meth:`stop` raises ProxyDied in a forked child: threads do not survive a fork.
    """

    def __init__(
        self,
        *,
        rank: int,
        ranks: int,
        window: int,
        window_bytes: int,
        settings: Settings,
        error: int,
        endpoints: Sequence[Sequence[Endpoint]],
        route: Sequence[int],
        near_cpus: Sequence[frozenset[int]] = (),
    ) -> None:
        if len(endpoints) != settings.proxies:
            raise ConfigError(f"{len(endpoints)} lists of endpoints for {settings.proxies} proxies")
        bad_cpus = [cpu for cpu in settings.proxy_cpus if not 0 <= cpu < (os.cpu_count() or 1)]
        if bad_cpus:
            raise ConfigError(
                f"UCCL_EP_PROXY_CPUS names {bad_cpus}, this machine has cores 0..{(os.cpu_count() or 1) - 1}"
            )
        warm()
        self._rank, self._ranks = rank, ranks
        self._proxies = settings.proxies
        self._cpus = settings.proxy_cpus
        self._near_cpus = list(near_cpus)
        self._error = error
        self._endpoints = [list(row) for row in endpoints]
        self._route = list(route)
        self._process = os.getpid()
        cores = len(os.sched_getaffinity(0))
        #: One per proxy, for tests and statistics.
        self.states = [
            ProxyState(
                rank=rank,
                ranks=ranks,
                proxy=proxy,
                proxies=settings.proxies,
                window=window,
                window_bytes=window_bytes,
                error=error,
                paths=[endpoint.data_path() for endpoint in row],
                capabilities=[endpoint.capabilities for endpoint in row],
                route=route,
                ring_slots=settings.ring_slots,
                quantum=settings.quantum,
                bytes_in_flight=settings.bytes_in_flight,
                peer_bytes_in_flight=settings.peer_bytes_in_flight,
                writes_in_flight=settings.writes_in_flight,
                die_after=settings.fault_proxy_after if proxy == 0 else 0,
                spins=_SPINS if cores >= _CORES_TO_SPIN else 0,
            )
            for proxy, row in enumerate(endpoints)
        ]
        ProxyState.join(self.states)
        self._owner = [proxy_of(stream, settings.proxies) for stream in range(STREAMS)]
        self._threads: list[threading.Thread] = []
        #: Per proxy, why its thread ended without being asked to. Written by that thread, read by check().
        self._deaths: dict[int, BaseException | None] = {}
        #: Per proxy, refused commands that check_commands() has raised.
        self._named = [0] * settings.proxies
        self._stopping = False
        self._forgotten: set[int] = set()

    # --- what the runtime hands to the kernels ---------------------------------------------------------------------

    def ring(self, stream: int) -> int:
        """Address of the ring that carries the commands of ``stream``."""
        return self.states[self._owner[stream]].ring

    def arrived(self, peer: int, stream: int) -> int:
        """Address of the int64 count of messages from ``peer`` that arrived without a gap (stored with release)."""
        return self.states[self._owner[stream]].arrived_address(peer, stream)

    def completed(self, peer: int, stream: int) -> int:
        """Address of the int64 count of own messages to ``peer`` completed locally, a prefix (stored with release)."""
        return self.states[self._owner[stream]].completed_address(peer, stream)

    # --- life ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the threads. Raises ProxyDied when called twice, TransportError when the system has no more of them."""
        self._same_process("start the proxies")
        if self._threads:
            raise ProxyDied(f"rank {self._rank}: the proxies were started before; make a new ProxyService")
        _running.add(self)
        for proxy in range(self._proxies):
            self._threads.append(start_thread(f"uccl-ep proxy {self._rank}.{proxy}", self._serve, proxy))

    def step(self, proxy: int = 0) -> int:
        """One iteration of a proxy in the calling thread, instead of :meth:`start`: the deterministic way to test.

        Returns:
            Amount of work done, or ``loop.STOPPED`` or ``loop.DIED``.
        """
        return int(step(self.states[proxy].address))

    def forget(self, peer: int, reason: int = 0) -> None:
        """``peer`` is lost, said goodbye or was masked: stop talking to it; no error of it is raised any more.

        Its waiting commands are discarded and count as completed. Raises ConfigError for an impossible rank.
        """
        self._same_process("forget a peer")
        if not 0 <= peer < self._ranks or peer == self._rank:
            raise ConfigError(f"rank {self._rank} cannot forget rank {peer} of {self._ranks}")
        self._forgotten.add(peer)
        for state in self.states:
            request_forget(state.address, peer, reason)

    def drain(self, deadline: float) -> bool:
        """Wait until everything accepted from the rings has completed.

        Args:
            deadline: ``time.monotonic()`` instant.

        Returns:
            False when something was still under way at the deadline (:meth:`counters` says what).

        Raises:
            ProxyDied: a thread ended, so nothing will move any more.
        """
        self._same_process("drain the proxies")
        while any(in_flight(state) for state in self.states):
            self._check_threads()
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.0005)
        return True

    def stop(self, deadline: float) -> None:
        """Stop and join the threads; afterwards the endpoints may be closed. May be called twice.

        Args:
            deadline: ``time.monotonic()`` instant.

        Raises:
            ProxyDied: called in a forked child (nothing is touched), or a thread did not stop in time (the memory it
                uses must then stay mapped).
        """
        self._same_process("stop the proxies")
        self._stopping = True
        for state in self.states:
            request_stop(state.address)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        alive = [thread.name for thread in self._threads if thread.is_alive()]
        if alive:
            raise ProxyDied(
                f"rank {self._rank}: {', '.join(alive)} did not stop in time, probably inside a transport call; "
                "its windows and endpoints must not be released"
            )
        _running.discard(self)

    def _serve(self, proxy: int) -> None:
        """Body of a thread. Whatever ends it without a request is noted, and releases everybody who waits."""
        death: BaseException | None = None
        try:
            self._dress_thread(proxy)
            status = run(self.states[proxy].address)
            if status == STOPPED:
                return
            death = ProxyDied("UCCL_EP_FAULT_PROXY_AFTER" if status == DIED else f"unknown status {status}")
        except BaseException as error:
            death = error
        # Reached only when the loop ended by itself: order matters, a kernel released by the sticky error must find
        # the reason in check().
        self._deaths[proxy] = death
        set_failure(self._error, FAILURE_PROXY_DIED, -1, -1, proxy, 0)

    def _dress_thread(self, proxy: int) -> None:
        """Name for debuggers, timer slack for short sleeps, and the core it is bound to. Only for this thread."""
        libc = ctypes.CDLL(None, use_errno=True)
        # 15 characters are what the kernel keeps of a thread's name.
        libc.prctl(_PR_SET_NAME, f"uccl-ep {self._rank}.{proxy}".encode()[:15], 0, 0, 0)
        # The default slack of 50 us would turn every 5 us sleep into 60 us or more.
        libc.prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
        if self._cpus:
            cpu = self._cpus[proxy % len(self._cpus)]
            try:
                os.sched_setaffinity(0, {cpu})
            except OSError as error:
                raise ConfigError(
                    f"UCCL_EP_PROXY_CPUS: the proxy may not run on core {cpu} ({error.strerror}); "
                    "name cores of this process's cpuset"
                ) from error
        elif self._near_cpus and self._near_cpus[proxy]:
            # A preference only: a cpuset that changed meanwhile is no reason not to start.
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, self._near_cpus[proxy])

    # --- failures --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise what has gone wrong, if anything.

        Raises:
            ProxyDied: a thread of this rank ended without being asked to.
            PeerLost: the connection to a peer that is not forgotten closed or failed.
            TransportError: a transport function failed.
            ProtocolError: a peer, or a command of this rank, broke the formats.
        """
        self._same_process("use the proxies")
        self._check_threads()
        for state in self.states:
            if read(state.address + FAULTS):
                self._raise_fault(state)

    def loss_of(self, peer: int) -> str:
        """What a proxy noticed of the end of ``peer``, in words: how it was reached and what its transport said, with
        the NIC and the status of its completion; "" when none noticed anything."""
        for state in self.states:
            words = state.peers[peer]
            fault = int(read(words[PEER_FAULT // 8 :].ctypes.data))
            if fault == FAILURE_PEER_LOST << 8 | FAULT_DOWN:
                value, detail = int(words[PEER_FAULT_VALUE // 8]), int(words[PEER_FAULT_DETAIL // 8])
                return self._ending(state, peer, int(words[PEER_FAULT_STREAM // 8]), value, detail)
        return ""

    def _ending(self, state: ProxyState, peer: int, stream: int, value: int, detail: int) -> str:
        """A DOWN that the loop noted, in words."""
        device = self._endpoints[state.proxy][self._route[peer]].describe(peer)
        reason = os.strerror(value) if value > 0 else "no reason given"
        if detail > 0:
            reason += f"; its last frame was cut off, at least {detail} bytes are missing"
        what = FAULT_WORDS[FAULT_DOWN]
        return f"{device}: {what} ({reason}), noticed by {self._where(state, stream)}"

    def _where(self, state: ProxyState, stream: int) -> str:
        on = f", stream {stream} ({name_of(stream)})" if stream >= 0 else ""
        return f"proxy {state.proxy} of rank {self._rank}{on}"

    def check_commands(self) -> None:
        """Raise, once for each, what was refused on streams that no operation waits for. Everything else goes on.

        Raises:
            ProtocolError: a command on a HOST stream was wrong; nothing of it was sent.
        """
        for state in self.states:
            refused = int(read(state.address + REFUSED))
            new = refused - self._named[state.proxy]
            if new == 0:
                continue
            words = state.word(REFUSED_LOW), state.word(REFUSED_HIGH), state.word(REFUSED_INDEX)
            self._named[state.proxy] = refused
            acknowledge(state.address, refused)
            low, high, index = words
            others = f" (and {new - 1} after it)" if new > 1 else ""
            raise ProtocolError(
                f"the proxy refused command {index} of its ring{others}: {self._words_of(state, low, high)}, noticed "
                f"by proxy {state.proxy} of rank {self._rank}. Nothing of it was sent and no message number was used "
                "for it; the group goes on. Look for whoever put it there",
                peer=HIGH["rank"].get(high),
                channel=channel_of(HIGH["stream"].get(high)),
            )

    def _words_of(self, state: ProxyState, low: int, high: int) -> str:
        """A command in words, and what is wrong with it."""
        peer, stream, kind = (HIGH[name].get(high) for name in ("rank", "stream", "kind"))
        source, target, length = LOW["source"].get(low), HIGH["target"].get(high), LOW["length"].get(low)
        return (
            f"a write of {length * UNIT} bytes from offset {source * UNIT} to offset {target * UNIT} of rank {peer}'s "
            f"window, stream {stream} ({name_of(stream)}), channel {channel_of(stream)}, kind {kind}; windows have "
            f"{state.word(WINDOW_BYTES)} bytes, ranks are 0..{self._ranks - 1}"
        )

    def _same_process(self, action: str) -> None:
        if os.getpid() != self._process:
            raise ProxyDied(
                f"rank {self._rank}: cannot {action} in process {os.getpid()}: the proxies belong to process "
                f"{self._process} and threads do not survive a fork. Create the buffer after the fork, or use spawn"
            )

    def _check_threads(self) -> None:
        for proxy, death in list(self._deaths.items()):
            raise ProxyDied(
                f"proxy {proxy} of rank {self._rank} ended: {death}. Nothing more is sent or received on its "
                "streams; close the buffer and create a new one"
            ) from death
        if self._stopping:
            return
        for thread in self._threads:
            if not thread.is_alive():
                raise ProxyDied(f"{thread.name} ended without a reason; close the buffer and create a new one")

    def _raise_fault(self, state: ProxyState) -> None:
        fault = int(read(state.address + FAULT))
        if fault:
            raise self._error_of(
                state,
                fault,
                peer=state.word(FAULT_PEER),
                stream=state.word(FAULT_STREAM),
                value=state.word(FAULT_VALUE),
                detail=0,
            )
        for peer in range(self._ranks):
            fault = int(read(state.peers[peer, PEER_FAULT // 8 :].ctypes.data))
            if fault and peer not in self._forgotten:
                words = state.peers[peer]
                raise self._error_of(
                    state,
                    fault,
                    peer=peer,
                    stream=int(words[PEER_FAULT_STREAM // 8]),
                    value=int(words[PEER_FAULT_VALUE // 8]),
                    detail=int(words[PEER_FAULT_DETAIL // 8]),
                )

    def _error_of(
        self, state: ProxyState, fault: int, *, peer: int, stream: int, value: int, detail: int
    ) -> UcclEpError:
        """The exception for a fault noted by the loop: ``failure << 8 | code``."""
        failure, code = fault >> 8, fault & 255
        what = FAULT_WORDS.get(code, f"fault {code}")
        known = 0 <= peer < self._ranks and self._route[peer] >= 0
        row = self._endpoints[state.proxy]
        device = row[self._route[peer]].describe(peer) if known else ", ".join(one.capabilities.name for one in row)
        where = self._where(state, stream)
        channel = channel_of(stream) if stream >= 0 else -1
        if failure == FAILURE_PEER_LOST:
            cause = self._ending(state, peer, stream, value, detail)
            return PeerLost(
                f"rank {peer} is gone ({cause}). Next step: read its log; then mask it on every rank that is left, or "
                "close the buffer on all of them",
                peer=peer,
                phase="proxy",
                channel=channel,
                cause=cause,
            )
        if failure == FAILURE_PROTOCOL and code >= FAULT_COMMAND_KIND:
            # of a command that parted from its destination, value and detail are the two words
            command = f": {self._words_of(state, value, detail)}" if detail else f" (peer {peer}, word {value:#x})"
            return ProtocolError(
                f"a kernel of this rank enqueued {what}{command}, noticed by {where}. Nothing of it was sent, and the "
                f"operation that waits for it ends on both sides. Likely cause: memory was overwritten; mask rank "
                f"{peer} or close the buffer",
                peer=peer if known else -1,
                channel=channel,
            )
        if failure == FAILURE_PROTOCOL:
            return ProtocolError(
                f"rank {peer} ({device}) sent {what}: {value:#x} arrived, {_EXPECTED[code].format(detail=detail)}, "
                f"noticed by {where}. Its connection is closed. Likely cause: the ranks run different versions, or "
                f"memory was overwritten; look at the log of rank {peer}, then mask the rank or close the buffer",
                peer=peer if known else -1,
                channel=channel,
            )
        number = -value if value < 0 else 0
        name = errno.errorcode.get(number, "")
        device = "; ".join(words for one in row if isinstance(one, Diagnosed) and (words := one.diagnosis())) or device
        return TransportError(
            f"{what} ({device}, status {value} {name}), noticed by {where}"
            + (f", peer {peer}" if peer >= 0 else "")
            + ". Close the buffer; look for errors of the device or the connection in the system log",
            device=device,
            errno=number,
            status=value,
        )

    # --- statistics ------------------------------------------------------------------------------------------------

    def counters(self) -> dict[str, Any]:
        """Snapshot: ``{"proxies": [...], "total": {...}, "streams": [...], "latency": {stream: buckets}}``.

        See :mod:`uccl_ep_serving.proxy.stats` for the names. Safe at any time, before start and after stop too.
        """
        proxies = [proxy_counters(state) for state in self.states]
        return {
            "proxies": proxies,
            "total": {name: sum(counters[name] for counters in proxies) for name in proxies[0]},
            "streams": [entry for state in self.states for entry in stream_states(state)],
            "latency": {stream: b for state in self.states for stream, b in latencies(state).items()},
        }


#: Services whose threads run: stopped at interpreter exit, before the memory under them goes away.
_running: weakref.WeakSet[ProxyService] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    for service in list(_running):
        # A forked child inherits the set but no threads; a thread that does not stop cannot be helped here.
        with contextlib.suppress(ProxyDied):
            service.stop(time.monotonic() + 2.0)
