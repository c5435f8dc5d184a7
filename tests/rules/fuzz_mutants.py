"""Checks of the parsers, each taken out to see that ``tests/fuzz`` notices, and after how many cases at most.

Those with a marker of their own stand in :data:`FUZZ_MUTANTS`; rules of other tables, which the fuzzing must notice as
well, in :data:`ALSO`.
"""

from __future__ import annotations

from typing import NamedTuple

from tests.rules.mutation import INSTEAD, NEVER, SKIP, Rules, Way
from tests.rules.nic_mutants import NIC_MUTANTS
from tests.rules.tcp_mutants import TCP_MUTANTS

__all__ = ["ALSO", "FAMILIES", "FUZZ_MUTANTS", "PROXY", "Check"]


class Check(NamedTuple):
    """How a check is taken out, which subject must notice, and the most cases that it needs."""

    way: Way
    subject: str
    cases: int


_PROTOCOL, _CONTROL = "uccl_ep_serving.protocol", "uccl_ep_serving.control_plane"
_TRANSPORT = "uccl_ep_serving.proxy.transport"
#: Modules that are executed anew, by subject; the last one is what the subject takes. Those with MACs are of "tcp".
FAMILIES = {
    "tcp": tuple(f"{_TRANSPORT}.{name}" for name in ("tcp_auth", "tcp_link", "tcp_data")),
    "mailboxes": (f"{_TRANSPORT}.shm_data",),
    "handshakes": (f"{_PROTOCOL}.frame", f"{_PROTOCOL}.handshake"),
    "efa": (f"{_TRANSPORT}.nic.efa_data",),
    "roce": (f"{_TRANSPORT}.nic.roce_link", f"{_TRANSPORT}.nic.roce_data"),
    "control": (f"{_CONTROL}.outbox", f"{_CONTROL}.frames"),
}

FUZZ_MUTANTS = Rules[Check](
    ("proxy", "uccl_ep_serving"),
    {
        "frame: it is a write or a count": Check(NEVER, "tcp", 1_000),
        "frame: its number is the next one": Check(NEVER, "tcp", 1_000),
        "frame: its length is bounded": Check(NEVER, "tcp", 2_000),
        "frame: it lies in the window": Check(NEVER, "tcp", 1_000),
        "frame: its source is the peer of the connection": Check(NEVER, "tcp", 1_000),
        "frame: with a MAC it fits where it is held back": Check(NEVER, "tcp-macs", 20_000),
        "mailbox: a tail lies between what was known and what was put in": Check(NEVER, "mailboxes", 500),
        "mailbox: a word holds nothing else": Check(NEVER, "mailboxes", 500),
        "mailbox: bytes are bounded": Check(NEVER, "mailboxes", 500),
        "mailbox: an immediate is of the source of its ring": Check(NEVER, "mailboxes", 500),
        "handshake: only a refusal has a code": Check(NEVER, "handshakes", 4_000),
        "handshake: a frame begins with its magic": Check(NEVER, "handshakes", 1_000),
        "handshake: what a hello claims is in range": Check(
            INSTEAD("Hello(*_HELLO.unpack(body))"), "handshakes", 1_000
        ),
        "handshake: a count is in range": Check(SKIP, "handshakes", 1_000),
        "handshake: the version is this one": Check(NEVER, "handshakes", 2_000),
        "handshake: a frame is the one that is due": Check(NEVER, "handshakes", 2_000),
        "handshake: the acceptor proves the secret": Check(NEVER, "handshakes", 500),
        "handshake: the welcome is proven, with its count": Check(NEVER, "handshakes", 500),
        "handshake: the connector proves the secret, and its count": Check(NEVER, "handshakes", 500),
        "handshake: the job is the same": Check(NEVER, "handshakes", 1_000),
        "handshake: the shape of the group is the same": Check(NEVER, "handshakes", 1_000),
        "handshake: the two ranks are those that are meant": Check(NEVER, "handshakes", 1_000),
        "control: a frame is one of ours": Check(NEVER, "control", 200),
        "control: nothing of a frame over TCP counts before its MAC is checked": Check(NEVER, "control", 500),
        "control: a frame has the descriptors that it names": Check(NEVER, "control", 500),
        "control: no descriptors are kept that no frame names": Check(NEVER, "control", 500),
        "control: a count lies between what was known and what was sent": Check(NEVER, "control", 1_000),
        "completion: its rank exists and it has an immediate": Check(NEVER, "efa", 100),
        "completion: it is of a write with an immediate": Check(NEVER, "roce", 500),
    },
)

#: Of other tables.
ALSO = {
    rule: Check(table[rule].way, subject, 500)
    for table, subject, rule in (
        (TCP_MUTANTS, "tcp", "a peer has no more frames than were sent"),
        (TCP_MUTANTS, "tcp-macs", "nothing of a header is believed before its MAC is checked"),
        (TCP_MUTANTS, "tcp-macs", "no byte of a payload reaches the window before its MAC is checked"),
        (NIC_MUTANTS, "efa", "efa: an immediate is believed only from its rank's queue pair"),
        (NIC_MUTANTS, "efa", "efa: an immediate is believed only from its rank's address"),
        (NIC_MUTANTS, "roce", "roce: the source in an immediate is the rank of its queue pair"),
    )
}
#: Rules of the proxy, by the subject that must notice; how they are taken out stands in proxy_mutants.py.
PROXY = {
    "a stream has one owner": ("efa", 500),
    "credits are bounded by what was sent": ("efa", 500),
    "a repeat behind the prefix changes nothing": ("efa", 500),
    "a repeat of a held write changes nothing": ("efa", 2_000),
    "only a prefix is published": ("efa", 500),
    "nothing is believed from a peer that was dropped": ("efa", 2_000),
    "a number out of sequence is a fault where order is kept": ("roce", 500),
}
