"""Bounded waits of CPU kernels.

A kernel never waits longer than the slice it was given: it returns ``STATUS_PENDING`` with the progress block filled,
the host checks signals and watchers, and calls it again (``KernelSpace.wait``). A kernel that waits for several
things loops over them itself with :func:`end_spin`; one that waits for one count uses :func:`wait_arrived` or
:func:`wait_completed`.
"""

from __future__ import annotations

from ...native.atomics import pause, poke
from ...native.calls import monotonic_ns, nanosleep_ns, sched_yield
from ...native.failure import failed
from ...native.jit import compiled
from ...protocol.context import STATUS_OK, STATUS_PENDING, STATUS_POISONED
from .context import arrived_count, completed_count, error_address

#: Spins of a waiting loop that only pause (about 40 ns each): a message of a running peer is usually that close.
SPINS = 64
#: Spins after which the loop stops yielding and naps. Yielding is what lets a proxy or a peer on the same core run.
YIELDS = 2048
#: Length of a nap. Only long waits get there; it costs them at most this much and frees the core for the engine.
NAP_NS = 50_000


@compiled
def note_progress(progress: int, peer: int, stream: int, arrived: int, expected: int) -> None:
    """Store in the progress block what is waited for. Reader: the host, after ``STATUS_PENDING``."""
    poke(progress, peer)
    poke(progress + 8, stream)
    poke(progress + 16, arrived)
    poke(progress + 24, expected)


@compiled
def end_spin(context: int, spin: int, slice_end_ns: int) -> int:
    """End spin ``spin`` (0, 1, 2, …) of a waiting loop: relax the core, more so the longer the wait.

    Returns:
        STATUS_OK to read again, STATUS_PENDING when CLOCK_MONOTONIC has reached ``slice_end_ns``, STATUS_POISONED when
        the sticky error is set.
    """
    # rule: a wait ends when the sticky error is set
    if failed(error_address(context)):
        return STATUS_POISONED
    if monotonic_ns() >= slice_end_ns:
        return STATUS_PENDING
    if spin < SPINS:
        pause()
    elif spin < YIELDS:
        sched_yield()
    else:
        nanosleep_ns(NAP_NS)
    return STATUS_OK


@compiled
def wait_arrived(context: int, progress: int, peer: int, stream: int, expected: int, slice_end_ns: int) -> int:
    """Wait until ``expected`` messages of ``stream`` have arrived from ``peer``.

    Returns STATUS_OK (their bytes are visible), STATUS_PENDING with the progress block filled, or STATUS_POISONED.
    """
    spin = 0
    while True:
        count = arrived_count(context, peer, stream)
        if count >= expected:
            return STATUS_OK
        status = end_spin(context, spin, slice_end_ns)
        if status != STATUS_OK:
            note_progress(progress, peer, stream, count, expected)
            return status
        spin += 1


@compiled
def wait_completed(context: int, progress: int, peer: int, stream: int, expected: int, slice_end_ns: int) -> int:
    """Wait until ``expected`` own messages of ``stream`` to ``peer`` completed locally; statuses as wait_arrived."""
    spin = 0
    while True:
        count = completed_count(context, peer, stream)
        if count >= expected:
            return STATUS_OK
        status = end_spin(context, spin, slice_end_ns)
        if status != STATUS_OK:
            note_progress(progress, peer, stream, count, expected)
            return status
        spin += 1
