"""Compiling is done before the ranks meet, and a long one is talked about."""

from __future__ import annotations

import fcntl
import functools
import logging
import threading
import time
from pathlib import Path

import pytest

from uccl_ep_serving import buffer, native
from uccl_ep_serving.config import Settings
from uccl_ep_serving.data_plane.topology import Nic, Topology
from uccl_ep_serving.kernels.select import warm_cpu_kernels
from uccl_ep_serving.native import failure, jit
from uccl_ep_serving.proxy import loop
from uccl_ep_serving.proxy.transport import shm_data, tcp_data
from uccl_ep_serving.proxy.transport.nic import efa_data, roce_data


@pytest.fixture
def impatient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """What is talked about after a second is so after a tenth; the cache directory is the test's own."""
    monkeypatch.setattr(jit, "cache_directory", lambda: tmp_path)
    monkeypatch.setattr(jit, "_SAY_SECONDS", 0.1)
    caplog.set_level(logging.INFO, logger=native.jit._log.name)


def test_a_directory_that_was_asked_for_and_cannot_be_used_is_talked_about_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    monkeypatch.setenv("UCCL_EP_CACHE_DIR", str(tmp_path / "mine"))
    choose = functools.cache(jit.cache_directory.__wrapped__)
    assert choose().is_relative_to(tmp_path / "mine")
    assert caplog.messages == []
    monkeypatch.setenv("UCCL_EP_CACHE_DIR", "/dev/null/nowhere")  # below a file: not even root can make it
    choose.cache_clear()
    directory = choose()
    assert choose() == directory
    assert directory.is_relative_to(tmp_path / "other")
    (said,) = caplog.messages
    assert "UCCL_EP_CACHE_DIR=/dev/null/nowhere cannot be written" in said
    assert str(directory) in said


@pytest.mark.usefixtures("impatient")
def test_a_long_compilation_is_talked_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with jit.compile_lock("7 kernels"):
        time.sleep(0.3)
    first, last = caplog.messages
    assert first == f"uccl_ep compiles 7 kernels: once, then cached in {tmp_path}"
    assert last.startswith("uccl_ep: 7 kernels ready after")


@pytest.mark.usefixtures("impatient")
def test_loading_is_not_talked_about(caplog: pytest.LogCaptureFixture) -> None:
    threads = threading.active_count()
    with jit.compile_lock("7 kernels"):
        pass
    assert threading.active_count() == threads
    time.sleep(0.2)
    assert caplog.messages == []


@pytest.mark.usefixtures("impatient")
def test_waiting_for_another_rank_is_talked_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def finish() -> None:
        time.sleep(0.3)
        fcntl.flock(holder, fcntl.LOCK_UN)

    with open(tmp_path / ".lock", "w") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        other = threading.Thread(target=finish)
        other.start()
        with jit.compile_lock("the proxy loop"):
            pass
        other.join()
    assert caplog.messages[0].startswith("uccl_ep waits for another process to compile the proxy loop")


_EFA, _BROADCOM = ("rdmap0s6", "efa", "Unknown"), ("bnxt_re0", "bnxt_en", "Ethernet")


@pytest.mark.parametrize(
    ("transport", "nics", "expected"),
    [
        ("auto", [], {"shm", "tcp"}),
        ("auto", [_BROADCOM], {"shm", "tcp", "roce"}),
        ("auto", [_EFA, _BROADCOM], {"shm", "tcp", "efa", "roce"}),
        ("auto", [("rxe0", "", "Ethernet")], {"shm", "tcp"}),  # a software device that nobody asked for
        ("shm", [_EFA], {"shm"}),
        ("tcp", [], {"tcp"}),
        ("roce", [], {"roce"}),
    ],
)
def test_everything_is_compiled_before_the_ranks_meet(
    monkeypatch: pytest.MonkeyPatch, transport: str, nics: list[tuple[str, str, str]], expected: set[str]
) -> None:
    """A rank on a host with a cold cache must not use up the deadlines of the others."""
    present = [
        Nic(name, driver, link, True, 100.0, 0, address=f"0000:0{place}:00.0" if driver else "", ports=(1,))
        for place, (name, driver, link) in enumerate(nics)
    ]
    monkeypatch.setattr(Topology, "read", lambda: Topology(nics=tuple(present)))
    warmed: set[str] = set()
    monkeypatch.setattr(loop, "warm", lambda: warmed.add("loop"))
    monkeypatch.setattr(buffer, "warm_cpu_kernels", lambda: warmed.add("kernels"))
    for name, module in (("shm", shm_data), ("tcp", tcp_data), ("roce", roce_data), ("efa", efa_data)):
        monkeypatch.setattr(module, "warm", lambda name=name: warmed.add(name))

    class Meeting:
        """The launcher's all-gather: the first thing that ranks do together."""

        rank, size = 0, 2

        def all_gather(self, payload: bytes) -> list[bytes]:
            raise ConnectionError(f"met with {' '.join(sorted(warmed))}")

    everything = {"loop", "kernels", *expected}
    with pytest.raises(ConnectionError, match=f"met with {' '.join(sorted(everything))}$"):
        buffer.Buffer(Meeting(), settings=Settings(transport=transport))


@pytest.mark.timeout(300)  # compiles everything where nothing is cached
def test_what_is_compiled_is_not_waited_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another Buffer, or a rebuilt window, while another program of this user compiles: nobody waits for it."""
    everything = (loop.warm, failure.warm, shm_data.warm, tcp_data.warm)
    for warm in everything:
        warm()
    warm_cpu_kernels()
    monkeypatch.setattr(jit, "cache_directory", lambda: tmp_path)
    with open(tmp_path / ".lock", "w") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        started = time.monotonic()
        for warm in everything:
            warm()
        warm_cpu_kernels()
        assert time.monotonic() - started < 1.0
