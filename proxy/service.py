"""The proxies of one Buffer: their memory, their threads, and what became of them."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from ..config import Settings
from ..errors import ConfigError, ProxyDied
from ..native.background import start_thread
from ..native.failure import acquired, set_failure
from ..native.groups import Group, load
from ..protocol.context import FAILURE_PROXY_DIED
from ..protocol.streams import STREAMS, proxy_of
from . import loop, words
from .faults import FaultReader
from .loop import DIED, STOPPED, run, step
from .state import ProxyState, acknowledge, request_forget, request_stop
from .stats import in_flight, latencies, proxy_counters, stream_states
from .transport.base import Endpoint, Reconnecting
from .transport.select import NIC_TRANSPORTS, SHM, TCP

_log = logging.getLogger("uccl_ep_serving")

#: prctl(2) options.
_PR_SET_NAME, _PR_SET_TIMERSLACK = 15, 29
#: What ``auto`` may come to once the peers are known, and always can.
_AUTO = (SHM, TCP)


def _refused_cpus(cpus: Sequence[int]) -> list[int]:
    """Those of ``cpus`` on which this process may not run."""
    own, refused = os.sched_getaffinity(0), []
    for cpu in dict.fromkeys(cpus):
        try:
            os.sched_setaffinity(0, {cpu})  # of this thread alone
        except (OSError, ValueError, OverflowError):
            refused.append(cpu)
    if cpus:
        with contextlib.suppress(OSError):  # it could not be changed before, either
            os.sched_setaffinity(0, own)
    return refused


def data_paths(transports: Iterable[str]) -> list[Group]:
    """The data paths of ``transports``, to compile. Only their modules are imported."""
    folders = {name: ".transport.nic" if name in NIC_TRANSPORTS else ".transport" for name in transports}
    return [importlib.import_module(f"{folder}.{name}_data", __package__).FUNCTIONS for name, folder in folders.items()]


def proxy_groups(transport: str, nics: Iterable[str] = ()) -> list[Group]:
    """What proxies may run, to compile: the loop and the data path of ``transport`` (a value of UCCL_EP_TRANSPORT).

    Args:
        nics: transports for which this host has NICs, which ``auto`` may come to as well.
    """
    return [loop.LOOP, *data_paths((*_AUTO, *nics) if transport == "auto" else (transport,))]


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
        spin: nanoseconds that an idle proxy keeps its core, from :func:`.spin.choose_spin`.

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
        spin: int = 0,
    ) -> None:
        if len(endpoints) != settings.proxies:
            raise ConfigError(f"{len(endpoints)} lists of endpoints for {settings.proxies} proxies")
        if bad_cpus := _refused_cpus(settings.proxy_cpus):
            raise ConfigError(
                f"UCCL_EP_PROXY_CPUS names {bad_cpus}, where this process may not run: the machine has cores "
                f"0..{(os.cpu_count() or 1) - 1}, and a container or a job scheduler may allow fewer"
            )
        load(loop.LOOP)
        self._rank, self._ranks = rank, ranks
        self._proxies = settings.proxies
        self._cpus = settings.proxy_cpus
        self._near_cpus = list(near_cpus)
        self._error = error
        self._endpoints = [list(row) for row in endpoints]
        self._faults = FaultReader(rank, ranks, self._endpoints, list(route))
        self._process = os.getpid()
        #: One per proxy, for tests and statistics.
        self.states = [
            ProxyState(
                settings,
                rank=rank,
                ranks=ranks,
                proxy=proxy,
                window=window,
                window_bytes=window_bytes,
                error=error,
                endpoints=row,
                route=route,
                spin=spin,
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

    def use_fence(self, proxy: int, index: int, fence: int) -> None:
        """Call the fence at this address before arrivals over endpoint ``index`` of ``proxy`` count; none has arrived
        yet."""
        self.states[proxy].use_fence(index, fence)

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

    def forget(self, peer: int) -> None:
        """``peer`` is lost, said goodbye or was masked: stop talking to it; no error of it is raised any more.

        Its waiting commands are discarded and count as completed. Raises ConfigError for an impossible rank.
        """
        self._same_process("forget a peer")
        if not 0 <= peer < self._ranks or peer == self._rank:
            raise ConfigError(f"rank {self._rank} cannot forget rank {peer} of {self._ranks}")
        self._forgotten.add(peer)
        for state in self.states:
            request_forget(state.address, peer)

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
        _log.error("rank %d: proxy thread %d has died: %s", self._rank, proxy, death, exc_info=death)
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
            # acquired, so that what explains it is there
            if state.glance[words.FAULTS // 8] and acquired(state.address + words.FAULTS):
                error = self._faults.error(state, self._forgotten)
                try:
                    if error is not None:
                        raise error
                finally:
                    del error  # this frame is in the traceback: a cycle would keep windows mapped

    def loss_of(self, peer: int) -> str:
        """What a proxy noticed of the end of ``peer``, in words: how it was reached and what its transport said, with
        the NIC and the status of its completion; "" when none noticed anything."""
        return next((said for state in self.states if (said := self._faults.loss_of(state, peer))), "")

    def check_commands(self) -> None:
        """Raise, once for each, what was refused on streams that no operation waits for. Everything else goes on.

        Raises:
            ProtocolError: a command on HOST was wrong; nothing of it was sent.
        """
        for state in self.states:
            if state.glance[words.REFUSED // 8] == self._named[state.proxy]:
                continue
            refused = acquired(state.address + words.REFUSED)
            new = refused - self._named[state.proxy]
            error = self._faults.refusal(state, new)
            self._named[state.proxy] = refused
            acknowledge(state.address, refused)
            raise error

    def _same_process(self, action: str) -> None:
        if os.getpid() != self._process:
            raise ProxyDied(
                f"rank {self._rank}: cannot {action} in process {os.getpid()}: the proxies belong to process "
                f"{self._process} and threads do not survive a fork. Create the buffer after the fork, or use spawn"
            )

    @property
    def death(self) -> str:
        """Which thread ended without being asked to and of what, in words; "" while none has."""
        return next(
            (f"proxy {proxy} of rank {self._rank} ended: {why}" for proxy, why in list(self._deaths.items())), ""
        )

    def _check_threads(self) -> None:
        for cause in list(self._deaths.values()):
            raise ProxyDied(
                f"{self.death}. Nothing more is sent or received on its streams; close the buffer and create a new one"
            ) from cause
        if self._stopping:
            return
        for thread in self._threads:
            if not thread.is_alive():
                raise ProxyDied(f"{thread.name} ended without a reason; close the buffer and create a new one")

    # --- statistics ------------------------------------------------------------------------------------------------

    def totals(self) -> dict[str, int]:
        """The ``total`` of :meth:`counters` alone."""
        return _total(self._counters())

    def counters(self) -> dict[str, Any]:
        """Snapshot: ``{"proxies": [...], "total": {...}, "streams": [...], "latency": {stream: buckets}}``.

        See :mod:`uccl_ep_serving.proxy.stats` for the names. Safe at any time, before start and after stop too.
        """
        proxies = self._counters()
        return {
            "proxies": proxies,
            "total": _total(proxies),
            "streams": [entry for state in self.states for entry in stream_states(state)],
            "latency": {stream: b for state in self.states for stream, b in latencies(state).items()},
        }

    def _counters(self) -> list[dict[str, int]]:
        """By proxy, and what its endpoints count."""
        return [
            proxy_counters(state)
            | {"reconnections": sum(one.reconnections for one in row if isinstance(one, Reconnecting))}
            for state, row in zip(self.states, self._endpoints, strict=True)
        ]


def _total(proxies: Sequence[dict[str, int]]) -> dict[str, int]:
    return {name: sum(counters[name] for counters in proxies) for name in proxies[0]}


#: Services whose threads run: stopped at interpreter exit, before the memory under them goes away.
_running: weakref.WeakSet[ProxyService] = weakref.WeakSet()


def _stop_all() -> None:
    for service in list(_running):
        # A forked child inherits the set but no threads; a thread that does not stop cannot be helped here.
        with contextlib.suppress(ProxyDied):
            service.stop(time.monotonic() + 2.0)


# Finalizers run from the newest to the oldest, so Buffers have closed by then, which takes their proxies. A function of
# atexit may come before all of them: torch, too, has finalizers.
weakref.finalize(ProxyService, _stop_all)
