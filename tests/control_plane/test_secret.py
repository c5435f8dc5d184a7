"""The job's secret: from a key that never travels, out of the store once all have read, and never shown."""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch.distributed as dist

from tests.support.control_threads import ThreadExchange, in_threads
from uccl_ep_serving.config import Settings
from uccl_ep_serving.control_plane import secret
from uccl_ep_serving.control_plane.bootstrap import Card, Introduction, StoreExchange, introduce
from uccl_ep_serving.control_plane.secret import fingerprint, job_secret, read_key
from uccl_ep_serving.errors import ConfigError


def key_file(directory: Path, content: str, name: str = "key") -> str:
    file = directory / name
    file.write_text(content)
    file.chmod(0o600)
    return str(file)


def introduced(exchange: Any, path: str) -> Introduction:
    return introduce(exchange, Settings(secret_file=path), socket_name="s", address="127.0.0.1", port=1, sizes={})


class Overheard(ThreadExchange):
    """Notes what every rank sends."""

    def __init__(self, exchange: ThreadExchange, heard: list[bytes]) -> None:
        super().__init__(exchange.rank, exchange._barrier, exchange._board)
        self._heard = heard

    def all_gather(self, payload: bytes) -> list[bytes]:
        self._heard.append(payload)
        return super().all_gather(payload)


def test_a_key_makes_a_secret_that_nobody_hears(tmp_path: Path) -> None:
    key, heard = "k" * 32, list[bytes]()
    path = key_file(tmp_path, f"{key}\n")
    found: list[Any] = [
        in_threads(2, lambda exchange: introduced(Overheard(exchange, heard), path).secret) for _ in range(2)
    ]
    for secrets in found:
        assert secrets[0] == secrets[1]
        assert len(secrets[0]) == 32
    assert found[0][0] != found[1][0], "each job has its own"
    # of the key that nobody hears and of rank 0's salt, which everybody does
    salts = [msgspec.msgpack.decode(payload, type=Card).salt for payload in heard]
    assert {secrets[0] for secrets in found} == {job_secret(key.encode(), salt) for salt in salts if salt}
    for payload in heard:
        assert key.encode() not in payload
        assert not any(secrets[0] in payload for secrets in found)


@pytest.mark.parametrize("other", ["o" * 32, ""], ids=["another", "none"])
def test_ranks_with_different_keys_are_refused_before_they_connect(tmp_path: Path, other: str) -> None:
    paths = [key_file(tmp_path, "k" * 32), key_file(tmp_path, other, "other") if other else ""]
    for error in in_threads(2, lambda exchange: introduced(exchange, paths[exchange.rank])):
        assert isinstance(error, ConfigError)
        assert "UCCL_EP_SECRET_FILE (fingerprint of the key): rank 0 has" in str(error)
        assert "k" * 32 not in str(error)


@pytest.mark.parametrize(
    ("content", "words"), [("short", "holds 5 bytes"), (" " * 40, "holds 0 bytes"), ("x" * 70_000, "16 to 65536")]
)
def test_what_is_no_key_is_refused(tmp_path: Path, content: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"UCCL_EP_SECRET_FILE=.*{words}"):
        read_key(key_file(tmp_path, content))


def test_a_file_that_is_not_there_is_refused_on_every_rank(tmp_path: Path) -> None:
    for error in in_threads(2, lambda exchange: introduced(exchange, "" if exchange.rank else str(tmp_path / "no"))):
        assert isinstance(error, ConfigError)
        assert "no cannot be read: No such file" in str(error)


def test_a_pipe_is_read_to_its_end_and_not_waited_for_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell's <(command) is one."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    with monkeypatch.context() as patch:
        patch.setattr(secret, "_PIPE_SECONDS", 0.3)
        with pytest.raises(ConfigError, match="is a pipe, and nobody has written to it"):
            read_key(str(pipe))

    def write() -> None:
        with pipe.open("wb", buffering=0) as opened:
            for part in (b"k" * 16, b"l" * 16):
                opened.write(part)
                time.sleep(0.05)

    writer = threading.Thread(target=write)
    writer.start()
    assert read_key(str(pipe)) == b"k" * 16 + b"l" * 16
    writer.join()


def test_a_file_that_others_can_read_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = key_file(tmp_path, "k" * 32)
    assert read_key(path) == b"k" * 32
    assert not caplog.text
    Path(path).chmod(0o640)  # as Kubernetes mounts a secret for fsGroup
    read_key(path)
    assert "can be read by its group" in caplog.text
    assert "kkkk" not in caplog.text
    for mode in (0o604, 0o620, 0o602):
        Path(path).chmod(mode)
        with pytest.raises(ConfigError, match=r"can be read or written by other users.*chmod 600"):
            read_key(path)


def test_neither_is_shown() -> None:
    salt = b"s" * 32
    card = Card(0, 1, "1", 1, 7, "host", salt=salt)
    shown = f"{card!r} {Introduction((card,), salt)!r}"
    assert "sss" not in shown
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(card), type=Card) == card
    assert job_secret(b"", salt) == salt
    assert fingerprint(b"") == ""


@pytest.mark.parametrize("kind", ["hash", "tcp"])
def test_the_store_forgets_what_all_have_read(kind: str) -> None:
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False) if kind == "tcp" else None
    shared = dist.HashStore()
    shared.set_timeout(datetime.timedelta(seconds=20))

    def body(exchange: ThreadExchange) -> list[list[bytes]]:
        store = dist.TCPStore("localhost", server.port, is_master=False) if server else shared
        mine = StoreExchange(store, exchange.rank, 3, "job")
        return [mine.all_gather(f"{call} of {exchange.rank}".encode()) for call in range(4)]

    for found in in_threads(3, body):
        assert found == [[f"{call} of {rank}".encode() for rank in range(3)] for call in range(4)]
    left = server or shared
    names = [f"{call}/{who}" for call in range(1, 5) for who in (0, 1, 2, "read")]
    assert not any(dist.PrefixStore("job", left).check([name]) for name in names)


def _in_a_process(code: str, **environment: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout.strip()


_TAKE = """
import os, subprocess
from uccl_ep_serving.config import Settings, deciding, unknown_variables
from uccl_ep_serving.control_plane.secret import read_key
assert "UCCL_EP_SECRET" not in deciding() and not unknown_variables()
keys = {read_key(""), read_key("")}
shown = open("/proc/self/environ").read() + repr(os.environ) + repr(Settings.from_environment())
shown += subprocess.run("env", capture_output=True, text=True).stdout
print(keys, "k" * 16 in shown)
"""


def test_a_key_in_the_environment_is_taken_out_of_it() -> None:
    assert _in_a_process(_TAKE, UCCL_EP_SECRET=f" {'k' * 32} ") == f"{{b'{'k' * 32}'}} False"


def test_a_key_in_the_environment_and_one_in_a_file_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("uccl_ep_serving.control_plane.secret._taken", None)
    monkeypatch.setenv("UCCL_EP_SECRET", "k" * 32)
    with pytest.raises(ConfigError, match="are both set"):
        read_key(key_file(tmp_path, "f" * 32))
    assert read_key("") == b"k" * 32, "it was taken, and stays known"
    monkeypatch.setenv("UCCL_EP_SECRET", "short")
    with pytest.raises(ConfigError, match="holds 5 bytes") as caught:
        read_key("")
    assert "short" not in str(caught.value)


@pytest.mark.parametrize(("name", "words"), [("UCCL_EP_SECRET", "holds 0 bytes"), ("UCCL_EP_SECRET_FILE", "and empty")])
@pytest.mark.parametrize("value", ["", "  "])
def test_an_empty_variable_is_not_taken_for_no_key(
    name: str, words: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an empty secret of Kubernetes, or a shell variable that is not set, gives it."""
    monkeypatch.setattr("uccl_ep_serving.control_plane.secret._taken", None)
    monkeypatch.setenv(name, value)
    path = Settings.from_environment().secret_file
    with pytest.raises(ConfigError, match=words if value == "" or name == "UCCL_EP_SECRET" else "cannot be read"):
        read_key(path)
