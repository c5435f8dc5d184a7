"""Handshakes side by side: what becomes of a connection that finds no descriptor."""

from __future__ import annotations

import errno
import selectors
import socket
from typing import Any

import pytest

from uccl_ep_serving.protocol import talks
from uccl_ep_serving.protocol.talks import Talks


class Held(Talks):
    """Holds so many strangers."""

    def __init__(self, strangers: int) -> None:
        nothing: Any = None
        super().__init__(nothing, nothing, 1, selectors.DefaultSelector())
        self.strangers_left = strangers

    def push_out(self, why: str) -> bool:
        self.strangers_left -= 1
        return self.strangers_left >= 0

    def unable(self, error: OSError, what: str) -> Exception:
        return RuntimeError(f"{what}: {error.strerror}")


@pytest.mark.parametrize("shortage", [errno.EMFILE, errno.ENFILE])
def test_who_finds_no_descriptor_asks_again_once_a_stranger_has_given_way(
    monkeypatch: pytest.MonkeyPatch, shortage: int
) -> None:
    """Not asked again, the peer would be waited for until the deadline."""

    def refused(*arguments: object, **named: object) -> socket.socket:
        raise OSError(shortage, "no more files")

    monkeypatch.setattr(talks.socket, "socket", refused)
    handshake: Any = None
    held = Held(1)
    assert held.dial((3, 0), ("127.0.0.1", 9), handshake, 1.0) is False
    assert not held.talks
    with pytest.raises(RuntimeError, match=r"socket for rank 3 at \[127.0.0.1\]:9: no more files"):
        held.dial((3, 0), ("127.0.0.1", 9), handshake, 1.0)


def test_another_refusal_costs_no_stranger(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: object, **named: object) -> socket.socket:
        raise OSError(errno.ENOBUFS, "no buffer space")

    monkeypatch.setattr(talks.socket, "socket", refused)
    handshake: Any = None
    held = Held(1)
    with pytest.raises(RuntimeError, match="no buffer space"):
        held.dial((3, 0), ("127.0.0.1", 9), handshake, 1.0)
    assert held.strangers_left == 1
