"""How a Buffer begins and ends when others do not play along: nothing hangs, nothing is left, the reason is named."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch.distributed as dist

from tests.support import bodies
from tests.support.alone import Alone
from tests.support.combinations import diagonal, first_of
from tests.support.ranks import Ranks
from tests.system.test_group import PATHS
from uccl_ep_serving.buffer import Buffer
from uccl_ep_serving.config import Settings
from uccl_ep_serving.control_plane import steps
from uccl_ep_serving.control_plane.bootstrap import StoreExchange
from uccl_ep_serving.data_plane import build, runtime
from uccl_ep_serving.data_plane.plane import DataPlane
from uccl_ep_serving.data_plane.segments import Segment
from uccl_ep_serving.errors import ConfigError, ProxyDied, TransportError, UcclEpError
from uccl_ep_serving.kernels.select import cpu_groups
from uccl_ep_serving.native.groups import load
from uccl_ep_serving.protocol.layout import NormalPlan, WindowLayout
from uccl_ep_serving.proxy.transport.tcp import TcpEndpoint


def _told(action: Callable[[], object]) -> str:
    """Name and message of what ``action`` raises."""
    try:
        action()
    except (UcclEpError, KeyboardInterrupt) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _ctrl_c_after(seconds: float, again: float = 0.0) -> None:
    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds, again)


def _warm(exchange: StoreExchange, overrides: dict[str, Any]) -> tuple[int, int]:
    """Threads and descriptors once everything that stays has been created."""
    bodies.both_modes(StoreExchange(exchange._store, exchange.rank, exchange.size, "warm"), overrides, 1)
    return bodies.settled()


def close_alone(exchange: StoreExchange, overrides: dict[str, Any], ctrl_c: bool) -> tuple[str, tuple[int, int]]:
    """Rank 0 leaves while rank 1 stays a little longer."""
    before = _warm(exchange, overrides)
    buffer = bodies.opened(exchange, overrides)
    bodies.round_trip(buffer)
    text = ""
    if exchange.rank == 0:
        if ctrl_c:
            _ctrl_c_after(0.2)
        text = _told(lambda: buffer.runtime.close(5.0 if ctrl_c else 0.3))
        buffer.destroy()
    else:
        time.sleep(1.5)
        buffer.destroy()
    return text, bodies.left_over(before)


@pytest.mark.parametrize(("path", "ctrl_c"), diagonal(["direct", "shm", "tcp"], [False, True]))
def test_a_rank_that_leaves_alone_leaves_nothing_behind(ranks: Ranks, path: str, ctrl_c: bool) -> None:
    (text, left), (_, left_on_the_other) = ranks.run(2, close_alone, PATHS[path], ctrl_c)
    assert text.partition(":")[0] == ("KeyboardInterrupt" if ctrl_c else "")
    assert left == left_on_the_other == (0, 0)


def left_on_a_device(exchange: StoreExchange, overrides: dict[str, Any], further: bool) -> tuple[float, str]:
    """Rank 1 leaves; the host of rank 0 waits for nothing, as where kernels on a device do, of a ``further`` operation
    or of none. How long they would have waited (at most 4 s for none), and what the next call says."""
    buffer = bodies.opened(exchange, overrides)
    bodies.round_trip(buffer)
    if exchange.rank == 1:
        buffer.runtime.close(0.2)
        return 0.0, ""
    runtime, space = buffer.runtime, buffer.runtime.space
    runtime.before_draining(lambda deadline: True)
    if further:
        runtime.begin_operation()
    started = time.monotonic()
    while not space.failed and time.monotonic() < started + (20.0 if further else 4.0):
        time.sleep(0.01)
    waited, said = time.monotonic() - started, _told(runtime.check)
    buffer.destroy()
    return waited, said


@pytest.mark.parametrize("path", first_of("tcp", "direct"))
def test_kernels_on_a_device_do_not_wait_for_a_rank_that_has_left(ranks: Ranks, path: str) -> None:
    (waited, said), _ = ranks.run(2, left_on_a_device, PATHS[path], True)
    assert waited < 8.0
    assert said.startswith("PeerLost")
    assert "rank 1 is gone (it closed its Buffer)" in said


def test_what_a_rank_that_has_left_has_begun_as_well_may_be_received(ranks: Ranks) -> None:
    """All had arrived: a hook that is called late is right, and so is a check."""
    (waited, said), _ = ranks.run(2, left_on_a_device, PATHS["direct"], False)
    assert waited >= 4.0
    assert said == ""


def grow_alone(exchange: StoreExchange, overrides: dict[str, Any]) -> tuple[list[str], tuple[int, int]]:
    """Rank 0 dispatches a new shape, rank 1 only after rank 0 has given up."""
    before = _warm(exchange, overrides)
    buffer = bodies.opened(exchange, {**overrides, "timeout": 1.0, "connect_timeout": 2.0})
    bodies.round_trip(buffer)
    if exchange.rank == 1:
        time.sleep(2.0)
    texts = [
        _told(lambda: bodies.round_trip(buffer, hidden=256)),
        _told(lambda: bodies.round_trip(buffer)),
        _told(lambda: bodies.normal_trip(buffer)),
    ]
    buffer.destroy()
    return texts, bodies.left_over(before)


@pytest.mark.parametrize("path", first_of("tcp", "direct"))
def test_a_rank_that_grows_alone_is_told_and_leaves_nothing_behind(ranks: Ranks, path: str) -> None:
    (zero, left0), (one, left1) = ranks.run(2, grow_alone, PATHS[path])
    assert zero[0].startswith("PeerTimeout: window layout")
    for text in zero[1:]:
        assert text.startswith("UcclEpError")
        assert "could not rebuild its window: Peer" in text
        assert text.count("build the group again") == 1
    for text in one:
        assert text.startswith("Evicted")
        assert "has not begun the operation in which rank 0 waits for it" in text
        assert text.count("build the group again") == 1
    assert left0 == left1 == (0, 0)


def over_process_groups(exchange: StoreExchange) -> list[Any]:
    """A Buffer over WORLD, made without naming a backend, and one over a part of it, at the same time."""
    dist.init_process_group(store=exchange._store, rank=exchange.rank, world_size=exchange.size)
    try:
        part = dist.new_group([1, 2])
        whole = Buffer(dist.group.WORLD, settings=bodies.settings())
        if exchange.rank == 0:
            refusal = _told(lambda: Buffer(part, settings=bodies.settings()))
            found: list[Any] = [refusal]
        else:
            half = Buffer(part, 0, 0, True, 24, True, False, False, True, False, settings=bodies.settings())
            found = [half.rank, half.group_size, half.explicitly_destroy]
            bodies.round_trip(half)
        bodies.round_trip(whole)
        if exchange.rank > 0:
            bodies.normal_trip(half)
            half.destroy()
        whole.destroy()
        return found
    finally:
        dist.destroy_process_group()


def test_two_buffers_over_a_world_and_a_part_of_it(mortal_ranks: Ranks) -> None:
    zero, one, two = mortal_ranks.run(3, over_process_groups)
    assert zero[0].startswith("ConfigError: group must be a process group that this process belongs to")
    assert one == [0, 2, True]
    assert two == [1, 2, True]


def interrupted_group(exchange: StoreExchange) -> tuple[str, float]:
    """Rank 0 opens a Buffer that rank 1 never opens, and gets Ctrl-C."""
    dist.init_process_group("gloo", store=exchange._store, rank=exchange.rank, world_size=exchange.size)
    if exchange.rank == 1:
        time.sleep(2.0)
        return "", 0.0
    # loaded beforehand: an interrupt inside a destructor of the compiler would be lost
    load(*cpu_groups())
    start = time.monotonic()
    _ctrl_c_after(0.3, 0.3)
    text = _told(lambda: Buffer(dist.group.WORLD, settings=bodies.settings()))
    signal.setitimer(signal.ITIMER_REAL, 0)
    return text, time.monotonic() - start


def test_ctrl_c_ends_a_wait_for_ranks_that_do_not_come(mortal_ranks: Ranks) -> None:
    (text, took), _ = mortal_ranks.run(2, interrupted_group)
    assert text.startswith("KeyboardInterrupt")
    assert took < 1.5


def _plane() -> DataPlane:
    layout = WindowLayout(3, None, NormalPlan(3, heap=4096, rounds=4096, chunk=4096, depth=1))
    plane = DataPlane(layout)
    plane.segments += [Segment.create("window", layout.nbytes), Segment.create("mailbox", 4096)]
    return plane


def test_a_segment_that_was_not_handed_over_is_named_and_the_others_are_closed() -> None:
    before = set(os.listdir("/proc/self/fd"))
    plane = _plane()
    window, mailbox = plane.segments
    handed = [[], [os.dup(window.fd), os.dup(mailbox.fd)], [os.dup(window.fd)]]
    with pytest.raises(TransportError, match="rank 2 on this host handed 1 segments"):
        plane.map_peers(0, {1, 2}, handed)
    assert handed[1] == []
    plane.close(0.0)
    assert set(os.listdir("/proc/self/fd")) == before


def test_memory_stays_mapped_under_a_proxy_that_does_not_stop(caplog: pytest.LogCaptureFixture) -> None:
    class Stuck:
        def stop(self, deadline: float) -> None:
            assert deadline > time.monotonic() + 1.0  # however little was left
            raise ProxyDied("proxy 0 did not stop in time")

    plane = _plane()
    plane.service = Stuck()  # type: ignore[assignment]
    window = plane.segments[0]
    with caplog.at_level(logging.ERROR):
        plane.close(time.monotonic())
    assert "did not stop in time" in caplog.text
    assert window.bytes.nbytes == window.nbytes


def test_what_the_facade_refuses() -> None:
    with pytest.raises(ConfigError, match="group must be a process group"):
        Buffer(None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="MPI"):
        Buffer(Alone(), comm=object())
    import torch

    buffer = Buffer(Alone(), settings=Settings.from_environment({}, heap_bytes=1 << 20))
    try:
        part = buffer.get_local_buffer_tensor(torch.bfloat16, torch.Size((4, 8)), offset=64)
        assert (part.shape, part.dtype) == ((4, 8), torch.bfloat16)
        assert buffer.get_local_buffer_tensor(torch.float32).shape == (1 << 18,)
        for size, offset in (((4, 8), -64), ((4, 8), 1), ((4, 1 << 20), 0)):
            with pytest.raises(ConfigError, match="not a part of the heap"):
                buffer.get_local_buffer_tensor(torch.bfloat16, torch.Size(size), offset=offset)
    finally:
        buffer.destroy()
    with pytest.raises(UcclEpError, match="closed"):
        buffer.get_local_buffer_tensor(torch.uint8)


def no_room(*_: Any, **__: Any) -> Segment:
    """In place of ``Segment.create``."""
    raise TransportError("cannot make a shared segment: File too large")


def grow_without_room(exchange: StoreExchange, overrides: dict[str, Any]) -> tuple[str, float]:
    """Rank 1 cannot make its new window."""
    buffer = bodies.opened(exchange, overrides)
    bodies.round_trip(buffer)
    begun = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        if exchange.rank == 1:
            patch.setattr(Segment, "create", no_room)
        text = _told(lambda: bodies.round_trip(buffer, hidden=256))
    seconds = time.monotonic() - begun
    buffer.destroy()
    return text, seconds


def test_a_rank_that_has_no_room_for_its_new_window_tells_the_others(ranks: Ranks) -> None:
    (zero, seconds), (one, _) = ranks.run(2, grow_without_room, PATHS["direct"])
    assert one == "TransportError: cannot make a shared segment: File too large"
    assert zero.startswith("PeerLost: ")
    assert "rank 1 is gone (it failed (cannot make a shared segment: File too large))" in zero
    assert seconds < 10


def open_without_room(exchange: StoreExchange, overrides: dict[str, Any]) -> str:
    """Rank 1 cannot make its first window."""
    with pytest.MonkeyPatch.context() as patch:
        if exchange.rank == 1:
            patch.setattr(Segment, "create", no_room)
        return _told(lambda: bodies.opened(exchange, overrides))


def test_a_rank_that_cannot_open_tells_the_others_why(ranks: Ranks) -> None:
    zero, one = ranks.run(2, open_without_room, PATHS["direct"])
    assert one == "TransportError: cannot make a shared segment: File too large"
    assert "rank 1 is gone (it failed (cannot make a shared segment: File too large))" in zero


def opened_without_counters(exchange: StoreExchange, overrides: dict[str, Any]) -> str:
    """Rank 1 is open, and cannot serve its live counters."""

    def refuse(*_: Any) -> None:
        raise TransportError("no descriptor is left")

    def opened_and_used() -> None:
        buffer = bodies.opened(exchange, overrides)
        try:
            bodies.round_trip(buffer)
        finally:
            buffer.destroy()

    with pytest.MonkeyPatch.context() as patch:
        if exchange.rank == 1:
            patch.setattr(runtime, "LiveServer", refuse)
        return _told(opened_and_used)


def test_a_rank_that_fails_behind_the_last_step_of_opening_tells_the_others_why(ranks: Ranks) -> None:
    zero, one = ranks.run(2, opened_without_counters, PATHS["tcp"])
    assert one == "TransportError: no descriptor is left"
    assert "rank 1 is gone (it failed (no descriptor is left))" in zero


def one_cannot_load(exchange: StoreExchange, overrides: dict[str, Any]) -> str:
    """Rank 2 cannot load its data paths, which all ranks hear in the same step."""

    def load(*_: Any) -> None:
        raise RuntimeError("no compiler here")

    with pytest.MonkeyPatch.context() as patch:
        if exchange.rank == 2:
            patch.setattr(build, "load", load)
            send = steps.send_frame

            def slow(link: Any, kind: int, number: int = 0, body: bytes = b"", descriptors: Any = ()) -> None:
                if link.peer == 1 and b"no compiler" in body:
                    time.sleep(0.5)
                send(link, kind, number, body, descriptors)

            patch.setattr(steps, "send_frame", slow)
        return _told(lambda: bodies.opened(exchange, overrides))


def test_what_all_ranks_refuse_alike_is_no_ranks_own_failure(ranks: Ranks) -> None:
    """Also of those that hear it last."""
    for text in ranks.run(3, one_cannot_load, PATHS["tcp"]):
        assert text.startswith("BootstrapError: ")
        assert "rank 2 could not" in text


def one_hangs_in_connecting(exchange: StoreExchange, overrides: dict[str, Any]) -> str:
    """Rank 1 does not connect, in a rebuild."""
    buffer = bodies.opened(exchange, {**overrides, "connect_timeout": 2.0})
    bodies.round_trip(buffer)
    connect = TcpEndpoint.connect

    def late(*args: Any) -> None:
        time.sleep(4.0)
        connect(*args)

    with pytest.MonkeyPatch.context() as patch:
        if exchange.rank == 1:
            patch.setattr(TcpEndpoint, "connect", late)
        text = _told(lambda: bodies.round_trip(buffer, hidden=256))
    buffer.destroy()
    return text


def test_a_rank_that_does_not_connect_is_named_by_the_others_which_stay(ranks: Ranks) -> None:
    zero, _, two = ranks.run(3, one_hangs_in_connecting, PATHS["tcp"])
    for text in (zero, two):
        assert not text.startswith("Evicted")
        assert "rank 1" in text


def close_under_a_step(exchange: StoreExchange, overrides: dict[str, Any]) -> tuple[str, float]:
    """Another thread of rank 0 waits for rank 1 to grow when rank 0 closes; rank 1 closes as well."""
    buffer = bodies.opened(exchange, overrides)
    bodies.round_trip(buffer)
    texts: list[str] = []
    if exchange.rank == 0:
        thread = threading.Thread(target=lambda: texts.append(_told(lambda: bodies.round_trip(buffer, hidden=256))))
        thread.start()
        while not buffer.stats()["waits_for"]:
            time.sleep(0.01)
        begun = time.monotonic()
        buffer.destroy()
        thread.join()
        return texts[0], time.monotonic() - begun
    time.sleep(1.0)
    buffer.destroy()
    return "", 0.0


def test_closing_ends_a_step_of_another_thread(ranks: Ranks) -> None:
    (text, seconds), _ = ranks.run(2, close_under_a_step, PATHS["direct"])
    assert text.startswith("UcclEpError: ")
    assert "this Buffer was closed meanwhile" in text
    assert seconds < 5


def interrupted_and_closed(exchange: StoreExchange, overrides: dict[str, Any]) -> str:
    """Ctrl-C ends an operation of rank 0 while rank 1 is late; rank 0 then closes."""
    buffer = bodies.opened(exchange, overrides)
    bodies.round_trip(buffer)
    if exchange.rank == 0:

        def interrupt() -> None:
            while not buffer.stats()["waits_for"]:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGALRM)

        _ctrl_c_after(0.0)
        threading.Thread(target=interrupt).start()
    else:
        time.sleep(1.5)
    text = _told(lambda: bodies.round_trip(buffer))
    buffer.destroy()
    return text


def test_a_rank_that_closes_after_ctrl_c_says_so(ranks: Ranks) -> None:
    zero, one = ranks.run(2, interrupted_and_closed, PATHS["direct"])
    assert zero.startswith("KeyboardInterrupt")
    assert "it closes its Buffer, after low-latency dispatch (KeyboardInterrupt)" in one


#: A program that keeps a Buffer to its end. What rank 0 has sent last is much, and nobody waits for it there.
KEPT_TO_THE_END = """
import sys
import torch, torch.distributed as dist
from uccl_ep_serving.buffer import Buffer
from uccl_ep_serving.config import Settings
from uccl_ep_serving.control_plane.bootstrap import StoreExchange

rank, place = int(sys.argv[1]), sys.argv[2]
settings = Settings.from_environment({}, direct=False, transport="tcp", device="cpu", heap_bytes=1 << 20)
buffer = Buffer(StoreExchange(dist.FileStore(place, 2), rank, 2), low_latency_mode=True, settings=settings)
tokens = 0 if rank else 1024
x, ids = torch.ones(tokens, 7168, dtype=torch.bfloat16), torch.ones(tokens, 1, dtype=torch.int64)
for _ in range(2):
    counts = buffer.low_latency_dispatch(x, ids, 1024, 2, use_fp8=False)[1]
    assert counts.tolist() == [1024 * rank]
"""


def test_what_was_sent_before_the_interpreter_ends_arrives(tmp_path: Path) -> None:
    """Buffers close before their proxies are stopped, whatever else has finalizers."""
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", KEPT_TO_THE_END, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [program.communicate(timeout=90)[0] for program in programs]
    finally:
        for program in programs:
            program.kill()
    assert [program.returncode for program in programs] == [0, 0], said
    assert "closes without the others" not in "".join(said)
