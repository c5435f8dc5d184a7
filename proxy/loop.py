"""The proxy loop: receive -> send -> back off -> stop, over raw addresses, without the interpreter.

:func:`step` is one iteration and :func:`run` repeats it, so tests drive exactly what production runs, one step at a
time. An iteration takes what the transports have for us, returns credits, posts what was queued, takes new commands
from the ring and rings the doorbells; each part is bounded, so none starves the others.
"""

from __future__ import annotations

from ..native.atomics import fetch_add, load32, load64, pause, peek, poke
from ..native.calls import call1, call3, futex_wait, futex_wake, monotonic_ns, nanosleep_ns, sched_yield
from ..native.groups import Group
from ..native.jit import compiled
from . import words
from .arrivals import arrive, grant_credits
from .faults import FAULT_DEVICE, FAULT_DOWN, FAULT_FENCE, blame_peer, blame_self, serve_requests
from .fence import flush_by_driver
from .flow import complete
from .ring import commands_in, send_queued, take_commands
from .state import acknowledge, request_forget, request_stop
from .transport.base import ARRIVED, DOWN, EVENT_BYTES, FAULT, FAULT_BITS, SENT

#: What :func:`step` and :func:`run` return instead of an amount of work: told to stop; injected fault.
STOPPED, DIED = -1, -2

#: Times of the back-off, nanoseconds. For SPIN (:mod:`.spin`) after the last work the loop keeps its core, until
#: YIELD_FOR it yields; then it sleeps SLEEP_LEAST (with a timer slack of 1 ns a sleep of 5 us takes 20 us on a stock
#: kernel) and, when idle for longer, a 32nd of the time that it has been idle, at most SLEEP_MOST. So it adds at most
#: 3% to any wait, and a lone idle proxy wakes 1,250 times a second: 14 us each on a virtual machine, where a sleeping
#: core is given back to the host.
YIELD_FOR = 50_000
SLEEP_LEAST = 5_000
SLEEP_MOST = 800_000
_SLEEP_SHARE = 32
#: Several long idle proxies of a rank wake in nap slots of this length, one proxy a slot, so that together they wake no
#: more often than a lone one. Who wakes looks at the rings of all, and wakes the others where it finds anything to do,
#: so that a command waits for no longer than that. While some proxies are busy it may: they look at their own rings
#: alone, and in their slots nobody wakes. What arrives while nothing is sent waits for its proxy's own slot; but ranks
#: of an operation all send.
NAP_SLOT = SLEEP_MOST
_LONG_IDLE = _SLEEP_SHARE * SLEEP_MOST


@compiled
def _break_endpoint(state: int, endpoint: int, fault: int, status: int) -> None:
    """poll, flush or the fence failed: the endpoint is of no use any more, and all of its peers are out of reach."""
    poke(endpoint + words.EP_BROKEN, 1)
    blame_self(state, fault, -1, -1, status)
    for peer in range(peek(state + words.RANKS)):
        if peek(words.peer_entry(state, peer) + words.PEER_ENDPOINT) == endpoint:
            blame_peer(state, peer, fault, -1, status, 0)


@compiled
def _peer_event(state: int, kind: int, value: int, peer: int, status: int) -> None:
    """DOWN or FAULT; a kind or rank that does not exist is the transport's own mistake."""
    if not 0 <= peer < peek(state + words.RANKS) or (kind != DOWN and kind != FAULT):
        blame_self(state, FAULT_DEVICE, peer, -1, kind)
        return
    if kind == DOWN:
        blame_peer(state, peer, FAULT_DOWN, -1, status, value)
    else:
        blame_peer(state, peer, status & (1 << FAULT_BITS) - 1, -1, value, status >> FAULT_BITS)


@compiled
def _receive(state: int, endpoint: int) -> int:
    """Take and handle the events of one endpoint; returns how many."""
    events = peek(state + words.EVENTS)
    count = call3(peek(endpoint + words.EP_POLL), peek(endpoint + words.EP_CONTEXT), events, words.EVENT_LIMIT)
    if count < 0:
        _break_endpoint(state, endpoint, FAULT_DEVICE, count)
        return 0
    fence = peek(endpoint + words.EP_FENCE)
    for i in range(count):
        event = events + i * EVENT_BYTES
        kind = peek(event)
        value = peek(event + 8)
        peer = peek(event + 16)
        status = peek(event + 24)
        if kind == SENT:
            complete(state, value)
        elif kind == ARRIVED:
            # rule: what a NIC wrote is made visible before it counts
            if fence != 0:
                # once, since all of the batch has arrived
                failure = call1(peek(fence), fence)
                if failure != 0:
                    _break_endpoint(state, endpoint, FAULT_FENCE, failure)
                    return count
                fence = 0
            arrive(state, peer, value, status)
        else:
            _peer_event(state, kind, value, peer, status)
    return count


@compiled
def step(state: int) -> int:
    """One iteration over the proxy at address ``state``: amount of work done (0 = idle), STOPPED or DIED."""
    if load64(state + words.STOP):
        return STOPPED
    poke(state + words.STAMP, peek(state + words.STAMP) + 1)
    work = serve_requests(state)
    first = peek(state + words.ENDPOINTS)
    count = peek(state + words.ENDPOINT_COUNT)
    for i in range(count):
        endpoint = first + i * words.ENDPOINT_ENTRY
        if peek(endpoint + words.EP_BROKEN) == 0:
            work += _receive(state, endpoint)
    # rule: credits are returned
    work += grant_credits(state)
    work += send_queued(state)
    taken = take_commands(state)
    for i in range(count):
        endpoint = first + i * words.ENDPOINT_ENTRY
        if peek(endpoint + words.EP_DIRTY):
            poke(endpoint + words.EP_DIRTY, 0)
            status = call1(peek(endpoint + words.EP_FLUSH), peek(endpoint + words.EP_CONTEXT))
            if status < 0:
                _break_endpoint(state, endpoint, FAULT_DEVICE, status)
    if taken < 0:
        return DIED
    words.count(state, words.C_ITERATIONS)
    return work + taken


@compiled
def next_nap_slot(now: int, proxy: int, proxies: int) -> int:
    """The first instant after ``now`` at which a nap slot of ``proxy`` begins: every slot belongs to one proxy."""
    cycle = NAP_SLOT * proxies
    return now + cycle - (now - proxy * NAP_SLOT) % cycle


@compiled
def others_have_commands(state: int) -> bool:
    """True when the ring of another proxy of this rank holds a command. Its owner may be asleep."""
    rings, me = peek(state + words.RINGS), peek(state + words.PROXY)
    for proxy in range(peek(state + words.PROXIES)):
        ring = peek(rings + 8 * proxy)
        if proxy != me and commands_in(ring, 1):
            return True
    return False


@compiled
def wake_others(state: int) -> None:
    """Wake the sleeping proxies of this rank."""
    wakeup = peek(state + words.WAKEUP)
    fetch_add(wakeup, 1)
    futex_wake(wakeup)


@compiled
def _sleep(state: int, idle: int, now: int, wakeups: int) -> None:
    """Sleep as long as a proxy may that has been idle for ``idle`` ns; ``wakeups``: WAKEUP before the last look."""
    words.count(state, words.C_SLEEPS)
    proxies = peek(state + words.PROXIES)
    if proxies == 1 or idle < _LONG_IDLE:
        nanosleep_ns(min(max(idle // _SLEEP_SHARE, SLEEP_LEAST), SLEEP_MOST))
        return
    futex_wait(peek(state + words.WAKEUP), wakeups, next_nap_slot(now, peek(state + words.PROXY), proxies))
    if others_have_commands(state):
        wake_others(state)


@compiled
def run(state: int) -> int:
    """Repeat :func:`step` until it returns STOPPED or DIED, backing off while there is nothing to do."""
    idle_since = 0
    idle = 0
    joined = peek(state + words.WAKEUP) != 0
    wakeups = 0
    while True:
        # before the look: who wakes us after it finds us awake, or not asleep yet
        heard = load32(peek(state + words.WAKEUP)) if joined else 0
        work = step(state)
        if work < 0:
            return work
        if work > 0 or heard != wakeups:
            if work > 0 and joined and idle >= _LONG_IDLE:
                wake_others(state)
            wakeups = heard
            idle_since = 0
            idle = 0
            continue
        now = monotonic_ns()
        if idle_since == 0:
            idle_since = now
        idle = now - idle_since
        if idle < peek(state + words.SPIN):
            pause()
        elif idle < YIELD_FOR:
            sched_yield()
        else:
            _sleep(state, idle, now, wakeups)


#: What a proxy runs, the host's access to its words, and what may stand in them.
LOOP = Group("proxy loop", step, run, request_stop, request_forget, acknowledge, flush_by_driver, commands_in)
