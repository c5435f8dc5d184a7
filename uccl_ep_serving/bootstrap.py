"""Peer-info exchange: who is in the group, do all ranks mean the same thing, and the job's secret.

It rides the engine's own process group, once per Buffer: fixed-size uint8 tensors holding msgpack, never pickle. After
that the group talks over its own control connections (``control.py``), whose every wait is bounded.
"""

from __future__ import annotations

import base64
import ipaddress
import os
import secrets
import socket
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import msgspec
import psutil
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from .config import Settings
from .errors import BootstrapError, ConfigError
from .protocol.message import FORMAT_VERSION

__all__ = ["Card", "Exchange", "Introduction", "StoreExchange", "TorchExchange", "introduce", "local_host"]

_SECRET_BYTES = 32


class Exchange(Protocol):
    """An all-gather of bytes among the ranks of a group; what a Buffer needs of the launcher."""

    @property
    def rank(self) -> int:
        """EP rank of this process, 0..size-1."""

    @property
    def size(self) -> int:
        """EP ranks."""

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Every rank's payload, by rank. Collective."""


class TorchExchange:
    """:class:`Exchange` over a ``torch.distributed`` process group (gloo: CPU tensors, NCCL: CUDA tensors)."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._device = torch.device("cpu")
        backend = str(dist.get_backend(group))
        if "gloo" not in backend and "mpi" not in backend:
            self._device = torch.device("cuda", torch.cuda.current_device())

    @property
    def rank(self) -> int:
        return dist.get_rank(self._group)

    @property
    def size(self) -> int:
        return dist.get_world_size(self._group)

    def all_gather(self, payload: bytes) -> list[bytes]:
        length = torch.tensor([len(payload)], dtype=torch.int64, device=self._device)
        lengths = [torch.empty_like(length) for _ in range(self.size)]
        dist.all_gather(lengths, length, group=self._group)
        most = max(int(one.item()) for one in lengths)
        block = torch.zeros(most, dtype=torch.uint8)
        block[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        block = block.to(self._device)
        blocks = [torch.empty_like(block) for _ in range(self.size)]
        dist.all_gather(blocks, block, group=self._group)
        return [
            bytes(one[: int(size.item())].cpu().numpy().tobytes()) for one, size in zip(blocks, lengths, strict=True)
        ]


class StoreExchange:
    """:class:`Exchange` over a ``torch.distributed`` store (TCPStore, FileStore), for programs without process groups.

    Args:
        store: shared by all ranks; its timeout bounds the wait.
        rank, size: of the group.
        name: distinguishes groups on the same store; each use of a store needs a new one.
    """

    def __init__(self, store: c10d.Store, rank: int, size: int, name: str = "uccl_ep") -> None:
        self._store = c10d.PrefixStore(name, store)
        self._calls = 0
        self.rank = rank
        self.size = size

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Every rank's payload. Raises BootstrapError when a rank does not appear within the store's timeout."""
        self._calls += 1
        # a store's values are text for its type hints; base64 keeps any store happy
        self._store.set(f"{self._calls}/{self.rank}", base64.b64encode(payload).decode())
        try:
            return [base64.b64decode(self._store.get(f"{self._calls}/{peer}")) for peer in range(self.size)]
        except dist.DistStoreError as error:
            raise BootstrapError(
                f"rank {self.rank}: not all of {self.size} ranks reached the store: {error}"
            ) from error


class Card(msgspec.Struct, frozen=True):
    """What a rank tells the others about itself.

    Attributes:
        rank, size: in the group.
        version, formats: of the package and of the wire formats.
        pid: process id, for messages.
        host_name: for messages.
        host: boot id and network namespace; ranks with equal ones can reach each other's abstract Unix sockets.
        socket_name: abstract Unix socket of the control listener (without the leading NUL).
        address, port: TCP control listener.
        agreed: settings on which all ranks must agree.
        sizes: byte sizes the caller asked for; must agree as well.
        secret: rank 0's job secret, empty from others.
    """

    rank: int
    size: int
    version: str
    formats: int
    pid: int
    host_name: str
    host: str
    socket_name: str
    address: str
    port: int
    agreed: dict[str, Any]
    sizes: dict[str, int]
    secret: bytes = b""


class Introduction(msgspec.Struct, frozen=True):
    """Result of :func:`introduce`."""

    cards: tuple[Card, ...]
    secret: bytes


def _host_identity() -> str:
    """Equal for two processes exactly when they share the kernel and the network namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"


def _addresses(interface: str) -> list[str]:
    """IP addresses of ``interface``, or of every interface that is up, IPv4 first, without link-local ones."""
    table = psutil.net_if_addrs()
    if interface and interface not in table:
        raise ConfigError(
            f"UCCL_EP_SOCKET_IFNAME={interface!r}: no such interface; there are {', '.join(sorted(table))}"
        )
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    found = []
    for name in (
        [interface] if interface else sorted(up, key=lambda n: (n.startswith(("docker", "br-", "veth", "virbr")), n))
    ):
        for entry in table[name]:
            if entry.family in (socket.AF_INET, socket.AF_INET6) and "%" not in entry.address:
                found.append(ipaddress.ip_address(entry.address))
    usable = [ip for ip in found if not ip.is_link_local]
    # sorted() is stable: interfaces keep their order within a class
    return [str(ip) for ip in sorted(usable, key=lambda ip: (ip.is_loopback, ip.version))]


def local_host(settings: Settings) -> str:
    """Address that peers on other hosts should use for this rank.

    ``UCCL_EP_SOCKET_IFNAME`` decides; else the route towards ``MASTER_ADDR``, when the launcher set one; else the
    first address that is not loopback; else loopback.
    """
    if not settings.socket_ifname and settings.master_address:
        try:
            family, _, _, _, target = socket.getaddrinfo(settings.master_address, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(target)
                return str(probe.getsockname()[0])
        except OSError:
            # An unresolvable master says nothing about the interfaces; choose among them.
            return (_addresses("") or ["127.0.0.1"])[0]
    return (_addresses(settings.socket_ifname) or ["127.0.0.1"])[0]


def _disagreement(cards: Sequence[Card]) -> str:
    """Words for everything on which ranks differ, empty when they agree."""
    reference = cards[0]
    findings = []
    for card in cards[1:]:
        pairs = {
            "package version": (reference.version, card.version),
            "wire formats": (reference.formats, card.formats),
            "group size": (reference.size, card.size),
            **{name: (reference.agreed.get(name), card.agreed.get(name)) for name in reference.agreed | card.agreed},
            **{name: (reference.sizes.get(name), card.sizes.get(name)) for name in reference.sizes | card.sizes},
        }
        findings += [
            f"{name}: rank {reference.rank} has {ours!r}, rank {card.rank} on {card.host_name} has {theirs!r}"
            for name, (ours, theirs) in pairs.items()
            if ours != theirs
        ]
    return "; ".join(findings)


def introduce(
    exchange: Exchange, settings: Settings, *, socket_name: str, address: str, port: int, sizes: dict[str, int]
) -> Introduction:
    """Exchange cards and check that all ranks mean the same group. Collective.

    Raises:
        ConfigError: ranks differ in version, settings or sizes; every rank raises, naming both sides.
        BootstrapError: the exchange returned something that is not the group's cards.
    """
    mine = Card(
        rank=exchange.rank,
        size=exchange.size,
        version=metadata.version("uccl_ep_serving"),
        formats=FORMAT_VERSION,
        pid=os.getpid(),
        host_name=socket.gethostname(),
        host=_host_identity(),
        socket_name=socket_name,
        address=address,
        port=port,
        agreed=settings.agreed(),
        sizes=sizes,
        secret=secrets.token_bytes(_SECRET_BYTES) if exchange.rank == 0 else b"",
    )
    try:
        cards = tuple(
            msgspec.msgpack.decode(one, type=Card) for one in exchange.all_gather(msgspec.msgpack.encode(mine))
        )
    except msgspec.DecodeError as error:
        raise BootstrapError(
            f"rank {exchange.rank}: a rank answered with something that is not a card ({error}). Likely cause: ranks "
            f"run "
            "different versions of uccl_ep_serving, or another collective runs on the same group at the same time"
        ) from error
    if len(cards) != exchange.size or [card.rank for card in cards] != list(range(exchange.size)):
        raise BootstrapError(
            f"rank {exchange.rank}: expected cards of ranks 0..{exchange.size - 1}, got {[card.rank for card in cards]}"
        )
    if words := _disagreement(cards):
        raise ConfigError(f"the ranks disagree, nothing was started: {words}. Give all ranks the same environment")
    if len(cards[0].secret) != _SECRET_BYTES:
        raise BootstrapError(f"rank 0 sent a secret of {len(cards[0].secret)} bytes, {_SECRET_BYTES} expected")
    return Introduction(cards, cards[0].secret)
