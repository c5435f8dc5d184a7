"""What a seed stands for: a group, its path, and the fault that hits it."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from tests.system.test_group import PATHS as SETTINGS

__all__ = ["KINDS", "PATHS", "TIMEOUT", "Trial", "draw"]

PATHS = ("direct", "shm", "tcp")
#: UCCL_EP_TIMEOUT of a trial, in seconds.
TIMEOUT = 1.5
MODES = ("low latency", "normal", "both")
_NODE_RANKS = 2

#: By kind what happens; ranks that it needs at least.
KINDS = {
    "kill": ("SIGKILL of a rank that works", 3),
    "kill two": ("SIGKILL of two ranks at once", 4),
    "kill in rebuild": ("SIGKILL of a second rank while the others go on without the first", 4),
    "kill in constructor": ("SIGKILL while the ranks open their Buffers", 3),
    "stop": ("SIGSTOP for good", 3),
    "wake": ("SIGSTOP, and SIGCONT after 0.5 to 1.5 times the deadline", 3),
    "pause": ("SIGSTOP, and SIGCONT long before the deadline", 3),
    "cut control": ("a control connection between two healthy ranks is shut down", 3),
    "cut wire": ("a connection between two healthy ranks on hosts of their own is shut down, control or data", 3),
    "cut data": ("a data connection between two healthy ranks is shut down", 3),
    "cut data twice": ("the same data connection is shut down, and again once it is mended", 3),
    "garble control": ("bytes of nobody in a control connection", 3),
    "garble data": ("bytes of nobody in a data connection", 3),
    "garble sealed": ("bytes of nobody in a data connection whose frames carry MACs", 3),
    "flood": ("strangers at every listener, from the first one on; then SIGKILL of a rank", 3),
    "leave": ("a rank's host raises: it destroys its Buffer, or does not even do that", 3),
    "cache": ("a cache that is damaged, full, or that others can write, when the ranks start", 3),
    "limit": ("a rank that starts with few descriptors, or little memory", 3),
}
#: Data connections are there over tcp alone.
_TCP_ONLY = frozenset(("cut wire", "cut data", "cut data twice", "garble data", "garble sealed"))
_FORMS = {
    "cut control": ("both", "write"),
    "cut wire": ("both", "write"),
    "cut data": ("both", "write"),
    "cut data twice": ("both", "write"),
    "garble control": ("noise", "header", "few", "zeros"),
    "garble data": ("noise", "header", "few", "zeros"),
    "garble sealed": ("noise", "header", "few", "zeros"),
    "leave": ("destroy", "exit"),
    "cache": ("empty", "cut", "noise", "shared", "full"),
    "limit": ("descriptors", "memory"),
}


@dataclass(frozen=True)
class Trial:
    """One group and its fault.

    Attributes:
        kind: of ``KINDS``. form: which of its forms, "" where it has one.
        path: of ``PATHS``. mode: of ``MODES``.
        node_ranks: so many consecutive ranks are a node, whose rows one of them forwards; 0: there are no nodes.
        victims: the ranks that it hits, in order; of a connection that is cut or garbled the end that does it.
        peer: its other end, -1 for other kinds.
        delay: seconds from the first good operations (or from the start of the constructors) to the fault.
        pause: seconds for which a rank is stopped, or comes late to a flood; between the kills of ``kill in rebuild``.
        share: 0 to 1: how much of a limited resource is left, or which of several connections.
    """

    seed: int
    kind: str
    form: str
    path: str
    mode: str
    ranks: int
    victims: tuple[int, ...]
    peer: int
    delay: float
    pause: float
    share: float
    node_ranks: int

    def __str__(self) -> str:
        form = f" ({self.form})" if self.form else ""
        link = f" and {self.peer}" if self.peer >= 0 else ""
        pause = f", {self.pause:.2f} s" if self.pause else ""
        nodes = f" in nodes of {self.node_ranks}" if self.node_ranks else ""
        return (
            f"seed {self.seed}: {self.kind}{form} of {' and '.join(map(str, self.victims))}{link} after "
            f"{self.delay:.3f} s{pause}; {self.ranks} ranks{nodes}, {self.path}, {self.mode}"
        )

    @property
    def settings(self) -> dict[str, Any]:
        """What differs from the tests' usual settings."""
        small = {"heap_bytes": 2 << 20, "round_bytes": 1 << 20, "timeout": TIMEOUT, "connect_timeout": 5.0}
        path = {"transport": self.path, "node_ranks": self.node_ranks} if self.node_ranks else SETTINGS[self.path]
        return {**path, **small, "tcp_auth": self.kind == "garble sealed"}


def draw(seed: int) -> Trial:
    """The trial of ``seed``: kinds and paths take turns at random, nothing else decides."""
    rng = random.Random(seed)
    kind = rng.choice(tuple(KINDS))
    path = "tcp" if kind in _TCP_ONLY else rng.choice(PATHS)
    least = KINDS[kind][1]
    ranks = rng.randint(least, 6)
    linked = kind.startswith(("cut", "garble"))
    hit = rng.sample(range(ranks), 2)
    # ranks of a node write each other's windows: there is nothing to cut between them
    parted = ranks % _NODE_RANKS == 0 and hit[0] // _NODE_RANKS != hit[1] // _NODE_RANKS
    # and to compile what forwards rows, with a cache that holds nothing, takes longer than a trial
    may_have_nodes = parted and path != "direct" and kind != "cache"
    pauses = {
        "wake": (0.5 * TIMEOUT, 1.5 * TIMEOUT),
        "pause": (0.02, 0.3 * TIMEOUT),
        "kill in rebuild": (0.0, 0.05),
        "cut data twice": (0.1, 0.3),
        "flood": (0.1, 0.6),
    }
    return Trial(
        seed=seed,
        kind=kind,
        form=rng.choice(_FORMS.get(kind, ("",))),
        path=path,
        mode=rng.choice(MODES),
        ranks=ranks,
        victims=tuple(hit) if kind in ("kill two", "kill in rebuild") else (hit[0],),
        peer=hit[1] if linked else -1,
        delay=rng.uniform(0.0, 0.15 if kind != "kill in constructor" else 0.25),
        pause=rng.uniform(*pauses[kind]) if kind in pauses else 0.0,
        share=rng.random(),
        node_ranks=rng.choice((0, _NODE_RANKS)) if may_have_nodes else 0,
    )
