"""Compiling is done before the ranks meet, and a long one is talked about."""

from __future__ import annotations

import errno
import fcntl
import functools
import logging
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numba.core.errors import NumbaError

from uccl_ep_serving import buffer
from uccl_ep_serving.native import cache, groups
from uccl_ep_serving.native.compiler import optimised
from uccl_ep_serving.native.groups import Group, load
from uccl_ep_serving.native.jit import Compiled, c_function, compiled, external


@pytest.fixture
def impatient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """What is talked about after a second is so after a tenth; the cache directory is the test's own."""
    monkeypatch.setattr(groups, "cache_directory", lambda: tmp_path)
    monkeypatch.setattr(groups, "read_directories", lambda: (tmp_path,))
    monkeypatch.setattr(groups, "_SAY_SECONDS", 0.1)
    caplog.set_level(logging.INFO, logger=groups._log.name)


def test_a_directory_that_was_asked_for_and_cannot_be_used_is_talked_about_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    monkeypatch.setenv("UCCL_EP_CACHE_DIR", str(tmp_path / "mine"))
    choose = functools.cache(cache.cache_directory.__wrapped__)
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


@compiled
def twice(value: int) -> int:
    """Twice as much."""
    return value + value


@pytest.mark.usefixtures("impatient")
def test_a_long_compilation_is_talked_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    group = Group("7 kernels", twice)
    compile_group = group.compile
    monkeypatch.setattr(group, "compile", lambda: (time.sleep(0.3), compile_group()))
    load(group)
    first, last = caplog.messages
    assert first == f"uccl_ep compiles 7 kernels: once, then cached in {tmp_path}"
    assert last.startswith("uccl_ep: 7 kernels ready after")


@pytest.mark.usefixtures("impatient")
def test_loading_is_not_talked_about(caplog: pytest.LogCaptureFixture) -> None:
    Group("7 kernels", twice).compile()
    threads = threading.active_count()
    function = Compiled(twice.function)
    again = Group("7 kernels", function)
    assert again.cached
    load(again)
    assert function(21) == 42
    assert threading.active_count() == threads
    time.sleep(0.2)
    assert caplog.messages == []


@pytest.mark.usefixtures("impatient")
def test_waiting_for_another_rank_is_talked_about(caplog: pytest.LogCaptureFixture) -> None:
    """What it compiles is loaded, and not compiled once more."""
    group = Group("the proxy loop", twice)

    def finish() -> None:
        time.sleep(0.3)
        Group("the proxy loop", twice).compile()
        fcntl.flock(holder, fcntl.LOCK_UN)

    with open(group.path.with_suffix(".lock"), "w") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        other = threading.Thread(target=finish)
        other.start()
        group.compile = None  # type: ignore[assignment, method-assign]
        load(group)
        other.join()
    assert caplog.messages[0].startswith("uccl_ep waits for another process to compile the proxy loop")


@pytest.mark.usefixtures("impatient")
def test_a_rank_that_hangs_while_compiling_does_not_hang_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "_LOCK_SECONDS", 0.1)
    group = Group("kernels", twice)
    with open(group.path.with_suffix(".lock"), "w") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        begun = time.monotonic()
        load(group)
        waited = time.monotonic() - begun
        # it was compiled here, and kept, under the eyes of who holds the lock
        with open(group.path.with_suffix(".lock"), "w") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert group.path.exists()
    assert waited > 0.1
    assert group.loaded
    assert twice(21) == 42


@pytest.mark.usefixtures("impatient")
def test_ranks_share_the_work() -> None:
    """While another process compiles the first group, the second one is compiled here."""
    first, second = Group("first", twice), Group("second", twice)
    done = threading.Event()

    def finish() -> None:
        assert done.wait(60)
        Group("first", twice).compile()
        fcntl.flock(holder, fcntl.LOCK_UN)

    compile_second = second.compile

    def noted() -> None:
        compile_second()
        done.set()

    with open(first.path.with_suffix(".lock"), "w") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        other = threading.Thread(target=finish)
        other.start()
        second.compile = noted  # type: ignore[assignment, method-assign]
        load(first, second)
        other.join()
    assert first.loaded
    assert second.loaded


def _fresh() -> tuple[Group, Any]:
    """A group of one function that nobody has loaded."""
    again = Compiled(twice.function)
    return Group("kernels", again), again


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("damage", ["empty", "cut", "changed"])
def test_a_damaged_file_is_compiled_again_and_said_so(
    damage: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(groups, "_SAY_SECONDS", 60.0)  # a busy machine may compile for longer than a tenth
    group = Group("kernels", twice)
    group.compile()
    content = group.path.read_bytes()
    changed = bytearray(content)
    changed[-1] ^= 1
    group.path.write_bytes({"empty": b"", "cut": content[: len(content) // 2], "changed": bytes(changed)}[damage])
    again, function = _fresh()
    load(again)
    assert function(4) == 8
    assert group.path.read_bytes() == content
    (said,) = caplog.messages
    assert said == f"compiled code in {group.path} is damaged: it is compiled again"


@pytest.mark.usefixtures("impatient")
def test_a_full_disk_costs_time_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(groups, "_SAY_SECONDS", 60.0)
    monkeypatch.setattr(os, "replace", full)
    group = Group("kernels", twice)
    load(group)
    assert twice(3) == 6
    assert not group.cached
    (said,) = caplog.messages
    assert "No space left on device" in said
    assert list(group.path.parent.glob("*.o*")) == []


def test_arguments_are_checked() -> None:
    for wrong in ((), (1, 2), ("1",), (1.5,), (None,)):
        with pytest.raises(TypeError):
            twice(*wrong)
    with pytest.raises(TypeError, match="takes no keyword arguments"):
        twice(value=1)
    with pytest.raises(OverflowError):
        twice(1 << 65)
    assert twice(np.int64(-3)) == -6


def test_every_kind_of_argument_and_result() -> None:
    @compiled
    def weighted(value: int, weight: float, single: np.float32, twofold: bool) -> float:
        return (value * weight + single) * (2 if twofold else 1)

    @compiled
    def positive(value: int) -> bool:
        return value > 0

    @compiled
    def nothing(value: int) -> None:
        pass

    Group("kinds", weighted, positive, nothing).compile(keep=False)
    assert weighted(3, 0.5, 0.25, True) == 3.5
    assert weighted(-3, 0.5, np.float32(0.25), False) == -1.25
    assert [positive(1), positive(-1)] == [True, False]
    assert nothing(1) is None
    unsigned = c_function("uint32(uint32, int32)")(lambda a, b: a + b)
    Group("unsigned", unsigned).compile(keep=False)
    assert unsigned(0xFFFFFFFF, 0) == 0xFFFFFFFF
    assert unsigned(5, -3) == 2


def test_what_nobody_defines_is_refused_and_not_called() -> None:
    """A symbol that is missing when code is loaded ends the process, so it must not get that far."""
    missing = external("uccl_ep_has_no_such_function", "int64(int64)")

    @compiled
    def calls(value: int) -> int:
        return missing(value)

    with pytest.raises(TypeError, match="uccl_ep_has_no_such_function, which nobody defines"):
        optimised({"entry": calls})


def test_a_directory_that_others_can_write_is_passed_over(tmp_path: Path) -> None:
    for mode, usable in ((0o700, True), (0o755, True), (0o775, False), (0o777, False), (0o1777, True)):
        parent = tmp_path / f"{mode:o}"
        parent.mkdir()
        parent.chmod(mode)
        assert cache.usable(parent / "uccl_ep_serving" / "digest") == usable, oct(mode)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    if os.geteuid() == 0:
        os.chown(foreign, 12345, 12345)
        assert not cache.usable(foreign / "uccl_ep_serving" / "digest")


def test_a_directory_in_which_others_may_put_files_of_their_own_is_no_cache(tmp_path: Path) -> None:
    """A sticky one, such as /tmp, may only stand above it."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    assert not cache.trusted(shared)
    assert cache.usable(shared / "mine")


def test_a_link_that_is_turned_leads_nowhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was looked at is what is used, whoever can turn the link."""
    mine, theirs, link = tmp_path / "mine", tmp_path / "theirs", tmp_path / "link"
    mine.mkdir()
    theirs.mkdir()
    link.symlink_to(mine)
    monkeypatch.setattr(cache, "cache_base", lambda: [str(link)])
    place, *_ = cache.places("digest")
    assert cache.usable(place)
    link.unlink()
    link.symlink_to(theirs)
    assert place.resolve().is_relative_to(mine)
    (mine / "uccl_ep_serving" / "again").symlink_to(theirs)
    assert not cache.trusted(mine / "uccl_ep_serving" / "again"), "a link in the place of the directory itself"


@pytest.mark.parametrize("way", ["written by others", "another's", "a link"])
def test_machine_code_that_another_user_could_have_written_is_not_read(
    way: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "group.o"
    cache.write_object(path, b"code")
    assert cache.read_object(path) == b"code"
    if way == "written by others":
        path.chmod(0o666)
    elif way == "another's":
        if os.geteuid() != 0:
            pytest.skip("only root gives files away")
        os.chown(path, 12345, 12345)
    else:
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    assert cache.read_object(path) is None
    assert "cannot be read" in caplog.text
    assert path.exists()


def test_what_root_has_compiled_into_an_image_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a user who cannot write there; what is missing there is kept where this user can."""
    image, own = tmp_path / "image", tmp_path / "own"
    group, _ = _fresh()
    monkeypatch.setattr(cache, "_candidates", lambda: [image, own])
    monkeypatch.setattr(groups, "cache_directory", lambda: image)
    image.mkdir(mode=0o755)
    group.compile()
    (file,) = image.iterdir()
    assert file.stat().st_mode & 0o777 == 0o644
    usable = cache.usable
    monkeypatch.setattr(cache, "usable", lambda directory: directory != image and usable(directory))
    chosen = cache.cache_directory.__wrapped__()
    assert chosen == own
    monkeypatch.setattr(cache, "cache_directory", lambda: chosen)
    found = cache.read_directories.__wrapped__()
    assert found == (own, image)
    monkeypatch.setattr(groups, "cache_directory", lambda: chosen)
    monkeypatch.setattr(groups, "read_directories", lambda: found)
    again, function = _fresh()
    assert again.cached
    load(again)
    assert function(6) == 12
    assert list(own.iterdir()) == []
    other = Group("another", Compiled(twice.function))
    load(other)
    assert {path.suffix for path in own.iterdir()} == {".o", ".lock"}
    # others can write it now
    image.chmod(0o777)
    assert cache.read_directories.__wrapped__() == (own,)


def test_every_source_of_compiled_code_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing of the GPU's kernels: Triton's own cache knows those."""
    files = [tmp_path / part / name for part in cache.SOURCES for name in ("a.py", "inside/a.py", "notes.txt")]
    for file in (*files, tmp_path / "kernels/triton/a.py"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("1")
    monkeypatch.setattr(cache, "_PACKAGE", tmp_path)

    def digest() -> str:
        """Of a process that has imported what is there."""
        monkeypatch.setattr(cache, "_IMPORTED", cache._state())
        return str(cache._source_digest.__wrapped__())

    seen = {digest()}
    (tmp_path / "kernels/triton/a.py").write_text("2")
    for file in files:
        if file.suffix != ".py":
            file.write_text("2")
    assert seen == {digest()}
    for file in files:
        if file.suffix == ".py":
            file.write_text("2")
            seen.add(digest())
            file.rename(file.with_name("b.py"))
            seen.add(digest())
    assert len(seen) == 1 + 2 * 2 * len(cache.SOURCES)


def test_without_sources_what_python_made_of_them_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or an upgrade would run the machine code of the version before."""
    for part in cache.SOURCES:
        (tmp_path / part).mkdir()
        (tmp_path / part / "a.pyc").write_text("1")
    monkeypatch.setattr(cache, "_PACKAGE", tmp_path)
    found = set()
    for content in ("1", "2"):
        (tmp_path / "native/a.pyc").write_text(content)
        monkeypatch.setattr(cache, "_IMPORTED", cache._state())
        found.add(cache._source_digest.__wrapped__())
    assert len(found) == 2


def test_a_directory_that_is_made_along_with_its_parents_is_trusted(tmp_path: Path) -> None:
    """Whatever the user's mask gives a group."""
    before = os.umask(0o002)
    try:
        assert cache.usable(tmp_path / "home" / ".cache" / "uccl_ep_serving" / "digest")
    finally:
        os.umask(before)


@pytest.mark.parametrize(("uid_map", "trusts"), [("0 0 4294967295", False), ("1000 1000 1", True), ("", True)])
def test_root_that_a_user_namespace_does_not_know(
    uid_map: str, trusts: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What stands in "/" is root's, whoever that is there; anything below may be of any user outside."""
    read = Path.read_text
    told = {"/proc/self/uid_map": uid_map, "/proc/sys/kernel/overflowuid": "65534\n"}
    monkeypatch.setattr(Path, "read_text", lambda path: told[str(path)] if str(path) in told else read(path))
    monkeypatch.setattr(cache, "_nameless_root", cache._nameless_root.__wrapped__)
    monkeypatch.setattr(Path, "lstat", lambda path: SimpleNamespace(st_mode=0o40755, st_uid=65534))
    assert [cache.ours(Path(place)) for place in ("/", "/home", "/home/user")] == [trusts, trusts, False]


def test_a_process_whose_sources_have_changed_compiles_for_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    digest = cache._source_digest.__wrapped__
    shared = digest()
    assert digest() == shared
    name, (inode, written, size) = next(iter(cache._IMPORTED.items()))
    monkeypatch.setattr(cache, "_IMPORTED", {**cache._IMPORTED, name: (inode + 1, written, size)})
    assert digest() != shared
    assert "sources of uccl_ep_serving have changed since this process began" in caplog.messages[-1]


@pytest.mark.parametrize(
    "setting", ["NUMBA_OPT=0", "NUMBA_DEBUGINFO=1", "NUMBA_ENABLE_PROFILING=1", "NUMBA_BOUNDSCHECK=1"]
)
def test_other_code_that_a_user_asks_numba_for_is_kept_apart(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A debugger's code would be what every later process runs."""
    digest = cache._source_digest.__wrapped__
    name, value = setting.split("=")
    monkeypatch.delenv(name, raising=False)
    usual = digest()
    monkeypatch.setenv(name, value)
    assert digest() not in ("", usual)


def test_without_any_directory_code_is_compiled_in_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cache, "usable", lambda directory: False)
    nowhere = cache.cache_directory.__wrapped__()
    monkeypatch.setattr(groups, "cache_directory", lambda: nowhere)
    monkeypatch.setattr(groups, "read_directories", lambda: (nowhere,))
    group, function = _fresh()
    load(group)
    assert function(5) == 10
    assert not group.cached
    assert f"compiled code is not kept in {nowhere}" in caplog.text


def test_what_raises_is_refused() -> None:
    @compiled
    def raises(value: int) -> int:
        if value > 3:
            raise ValueError(value)
        return value

    with pytest.raises(NumbaError):
        optimised({"entry": raises})


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, {"normal mode"}),
        ({"num_nvl_bytes": 1 << 20}, {"normal mode"}),
        ({"num_rdma_bytes": 1 << 20, "low_latency_mode": True}, {"low-latency mode"}),
        ({"num_nvl_bytes": 1 << 20, "low_latency_mode": True}, {"low-latency mode", "normal mode"}),
    ],
    ids=["nothing said", "normal", "low latency", "both"],
)
def test_what_the_arguments_say_is_compiled_before_the_ranks_meet(
    monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], expected: set[str]
) -> None:
    warmed: set[str] = set()
    monkeypatch.setattr(buffer, "load", lambda *groups: warmed.update(group.name for group in groups))

    class Meeting:
        """The launcher's all-gather: the first thing that ranks do together."""

        rank, size = 0, 2

        def all_gather(self, payload: bytes) -> list[bytes]:
            raise ConnectionError("met")

    with pytest.raises(ConnectionError, match="met"):
        buffer.Buffer(Meeting(), **arguments)
    assert warmed == {"sticky error", "proxy loop", "ids", *expected}
