"""Peer-info exchange: who is in the group, do all ranks mean the same thing, and the job's secret.

It rides the engine's own process group, once per Buffer: fixed-size uint8 tensors holding msgpack, never pickle. After
that the group talks over its own control connections (``mesh.py``), whose every wait is bounded.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import logging
import os
import secrets
import socket
import time
import weakref
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from ..config import Settings
from ..errors import BootstrapError, ConfigError
from ..protocol.message import FORMAT_VERSION
from .addresses import is_loopback
from .secret import SALT_BYTES, fingerprint, job_secret, read_key

__all__ = ["Card", "Exchange", "Introduction", "StoreExchange", "TorchExchange", "introduce", "refusing"]

_log = logging.getLogger("uccl_ep_serving")

#: Read when the module is loaded: a process that has no descriptor left must still be able to tell the others so.
_VERSION = metadata.version("uccl_ep_serving")
#: A collective, or a store, is looked at this often; a store less often after a while.
_POLL_SECONDS, _MOST_POLL_SECONDS = 0.001, 0.05
#: A wait for ranks that have not come yet is talked about this often.
_SAY_SECONDS = 10.0
#: Groups in one of whose collectives this rank was interrupted: gloo would pair the next one with what is left of that.
_INTERRUPTED: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


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


def _store_host(store: object) -> str:
    """The host on which a TCPStore is, seen through prefixes; "" for any other store."""
    while isinstance(store, c10d.PrefixStore):
        store = store.underlying_store
    return str(getattr(store, "host", ""))


class TorchExchange:
    """:class:`Exchange` over a ``torch.distributed`` process group (gloo: CPU tensors, NCCL: CUDA tensors).

    It calls the group's own methods: the functions of ``torch.distributed`` know only groups of the world, and engines
    that change size while they serve (vLLM's elastic expert parallelism) make theirs outside of it.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        # The group knows which devices its backends serve, also where it was made without naming one.
        devices = {device.type: device for device in group._device_types}
        if "cpu" in devices:
            self._device = torch.device("cpu")
        else:
            # A group that is bound to a device may be used with no other: its communicator lives there.
            kind = next(iter(devices), "cuda")
            self._device = group.bound_device_id or torch.device(kind, torch.get_device_module(kind).current_device())

    @property
    def rank(self) -> int:
        return self._group.rank()

    @property
    def size(self) -> int:
        return self._group.size()

    @property
    def store_host(self) -> str:
        """Host of the store that the group was made with, "" where that is no TCPStore."""
        store: c10d.Store | None
        try:
            store = self._group.get_group_store()
        except (AttributeError, RuntimeError):  # an older torch; a group without a store
            store = c10d._world.pg_map.get(self._group, (None, None))[1]
        return _store_host(store)

    def all_gather(self, payload: bytes) -> list[bytes]:
        length = torch.tensor([len(payload)], dtype=torch.int64, device=self._device)
        lengths = [torch.empty_like(length) for _ in range(self.size)]
        self._gather(lengths, length)
        most = max(int(one.item()) for one in lengths)
        block = torch.zeros(most, dtype=torch.uint8, device="cpu")
        if payload:
            block[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        block = block.to(self._device)
        blocks = [torch.empty_like(block) for _ in range(self.size)]
        self._gather(blocks, block)
        return [
            bytes(one[: int(size.item())].cpu().numpy().tobytes()) for one, size in zip(blocks, lengths, strict=True)
        ]

    def _gather(self, outputs: list[torch.Tensor], mine: torch.Tensor) -> None:
        """All-gather that says what it waits for and can be interrupted; bounded by the group's own timeout.

        Inside the collective neither would be: Python handles no signal there, and the default timeout is 30 minutes.
        """
        if self._group in _INTERRUPTED:
            raise BootstrapError(
                f"rank {self.rank}: an earlier Buffer of this process group was interrupted while the ranks opened it, "
                "so the group is of no use. Next step: make it again on all ranks (destroy_process_group and "
                "init_process_group, or new_group)"
            )
        try:
            work = self._group.allgather([outputs], [mine])
            said = time.monotonic()
            while not work.is_completed():
                time.sleep(_POLL_SECONDS)
                if time.monotonic() - said > _SAY_SECONDS:
                    said = time.monotonic()
                    _log.warning(
                        "rank %d of %d waits for the other ranks to open their Buffer: all ranks of the group must",
                        self.rank,
                        self.size,
                    )
            work.wait()
        except RuntimeError as error:
            raise BootstrapError(
                f"rank {self.rank}: the process group failed while the {self.size} ranks opened their Buffer: {error}. "
                "Likely cause: a rank died, or never opened one. Next step: read the log of the first rank that ended"
            ) from error
        except BaseException:
            _INTERRUPTED.add(self._group)
            raise


class StoreExchange:
    """:class:`Exchange` over a ``torch.distributed`` store (TCPStore, FileStore), for programs without process groups.

    Args:
        store: shared by all ranks; its timeout bounds the wait.
        rank, size: of the group.
        name: distinguishes groups on the same store; each use of a store needs a new one.
    """

    def __init__(self, store: c10d.Store, rank: int, size: int, name: str = "uccl_ep") -> None:
        self._store = c10d.PrefixStore(name, store)
        self._timeout: float = store.timeout.total_seconds()  # type: ignore[attr-defined]
        self._calls = 0
        self._is_interrupted = False
        self.rank = rank
        self.size = size
        self.store_host = _store_host(store)

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Every rank's payload. Raises BootstrapError when a rank does not appear within the store's timeout."""
        if self._is_interrupted:
            # the others may have read this rank's part of the call before, and would take it for one of the next
            raise BootstrapError(
                f"rank {self.rank}: an earlier all-gather of this exchange was interrupted. Next step: make another "
                "StoreExchange, with a new name, on all ranks"
            )
        self._calls += 1
        deadline = time.monotonic() + self._timeout
        try:
            # a store's values are text for its type hints; base64 keeps any store happy
            self._store.set(f"{self._calls}/{self.rank}", base64.b64encode(payload).decode())
            answers = [base64.b64decode(self._get(peer, deadline)) for peer in range(self.size)]
            self._forget()
            return answers
        except BootstrapError:
            raise
        except RuntimeError as error:
            raise BootstrapError(f"rank {self.rank}: the store of the {self.size} ranks failed: {error}") from error
        except BaseException:
            self._is_interrupted = True
            raise

    def _forget(self) -> None:
        """This rank has read everything: the last one that has takes it out of the store."""
        read = f"{self._calls}/read"
        if self._store.add(read, 1) == self.size:
            # a store that deletes nothing keeps them: the documentation says what that means
            with contextlib.suppress(NotImplementedError, RuntimeError):
                for key in (read, *(f"{self._calls}/{peer}" for peer in range(self.size))):
                    self._store.delete_key(key)

    def _get(self, peer: int, deadline: float) -> bytes:
        """``peer``'s payload. Asks instead of waiting: Python handles no signal (Ctrl-C) inside a store's wait."""
        key, pause = f"{self._calls}/{peer}", _POLL_SECONDS
        while not self._store.check([key]):
            if time.monotonic() >= deadline:
                raise BootstrapError(
                    f"rank {self.rank}: rank {peer} of {self.size} has not reached the store within "
                    f"{self._timeout:g} s. Next step: read that rank's log"
                )
            time.sleep(pause)
            pause = min(2 * pause, _MOST_POLL_SECONDS)
        return self._store.get(key)


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
        chosen: interface of the address, and what decided, for messages.
        agreed: settings on which all ranks must agree.
        sizes: byte sizes the caller asked for; must agree as well.
        salt: of the job's secret, from rank 0; empty from others.
        key: fingerprint of the key that this rank was given for it, "" for none.
        refusal: why this rank does not start, empty when it does: then nothing else of the card counts.
        misconfigured: the refusal is a ConfigError.
    """

    rank: int
    size: int
    version: str
    formats: int
    pid: int
    host_name: str
    host: str = ""
    socket_name: str = ""
    address: str = ""
    port: int = 0
    chosen: str = ""
    agreed: dict[str, Any] = {}
    sizes: dict[str, int] = {}
    salt: bytes = b""
    key: str = ""
    refusal: str = ""
    misconfigured: bool = False

    def __repr__(self) -> str:
        # without a key the salt is the secret
        return f"Card(rank={self.rank}, size={self.size}, host_name={self.host_name!r}, pid={self.pid})"


class Introduction(msgspec.Struct, frozen=True):
    """Result of :func:`introduce`; the secret is not shown."""

    cards: tuple[Card, ...]
    secret: bytes

    @property
    def group(self) -> str:
        """A name of this group, the same on all ranks and another one each time that it opens."""
        return hashlib.sha256(b"group" + self.cards[0].salt).hexdigest()[:8]  # without a key the salt is the secret

    def __repr__(self) -> str:
        return f"Introduction of {len(self.cards)} ranks"


def _card(exchange: Exchange, **fields: Any) -> Card:
    """This rank's card: who it is, and ``fields``."""
    return Card(
        rank=exchange.rank,
        size=exchange.size,
        version=_VERSION,
        formats=FORMAT_VERSION,
        pid=os.getpid(),
        host_name=socket.gethostname(),
        **fields,
    )


def _host_identity() -> str:
    """Equal for two processes when they share the kernel and the network namespace; unique where that is hidden."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise BootstrapError(f"{error}. Next step: raise the limit on open files (ulimit -n)") from error
        # A sandbox without these files: every rank counts as a host of its own and is reached over TCP.
        return secrets.token_hex(16)


def _disagreement(cards: Sequence[Card]) -> str:
    """Words for everything on which ranks differ, empty when they agree."""
    reference = cards[0]
    findings = []
    for card in cards[1:]:
        pairs = {
            "package version": (reference.version, card.version),
            "wire formats": (reference.formats, card.formats),
            "group size": (reference.size, card.size),
            "UCCL_EP_SECRET_FILE (fingerprint of the key)": (reference.key, card.key),
            **{name: (reference.agreed.get(name), card.agreed.get(name)) for name in reference.agreed | card.agreed},
            **{name: (reference.sizes.get(name), card.sizes.get(name)) for name in reference.sizes | card.sizes},
        }
        findings += [
            f"{name}: rank {reference.rank} has {ours!r}, rank {card.rank} on {card.host_name} has {theirs!r}"
            for name, (ours, theirs) in pairs.items()
            if ours != theirs
        ]
    return "; ".join(findings)


@contextlib.contextmanager
def refusing(exchange: Exchange) -> Iterator[None]:
    """What raises in here, before :func:`introduce`, is told to the other ranks, who would wait for this one's card.

    They raise ConfigError or BootstrapError with this rank's reason, and this rank its own exception, once all have
    come. Ctrl-C is not held up.
    """
    try:
        yield
    except Exception as error:
        # at once, because the others may come late
        _log.error("rank %d does not open its Buffer: %s", exchange.rank, error)
        refusal = f"{type(error).__name__}: {error}"
        card = _card(exchange, refusal=refusal, misconfigured=isinstance(error, ConfigError))
        try:
            exchange.all_gather(msgspec.msgpack.encode(card))
        except Exception as other:  # of any kind: what counts is why this rank does not start
            _log.error("rank %d could not tell the others so: %s: %s", exchange.rank, type(other).__name__, other)
        raise


def _check_refusals(cards: Sequence[Card]) -> None:
    """Raise what ranks that do not start gave as their reason."""
    refusals = [card for card in cards if card.refusal]
    if refusals:
        words = "; ".join(f"rank {card.rank} on {card.host_name} does not start: {card.refusal}" for card in refusals)
        kind = ConfigError if all(card.misconfigured for card in refusals) else BootstrapError
        raise kind(f"{words}. Nothing was started on any rank")


def _check_addresses(cards: Sequence[Card]) -> None:
    """Raise BootstrapError, the same on every rank, where ranks on another host cannot reach a rank's address."""
    step = "set UCCL_EP_SOCKET_IFNAME there to the interface that leads to the other hosts"
    first: dict[str, Card] = {}
    for card in cards if len({card.host for card in cards}) > 1 else ():
        who = f"rank {card.rank} on {card.host_name} listens on {card.address} ({card.chosen})"
        if is_loopback(card.address):
            raise BootstrapError(
                f"{who}, where other hosts cannot reach it. Likely cause: MASTER_ADDR or the process group's store is "
                f"on loopback, or it has no other network. Next step: {step}"
            )
        other = first.setdefault(card.address, card)
        if other.host != card.host and other.host_name != card.host_name:
            raise BootstrapError(
                f"{who}, and so does rank {other.rank} on {other.host_name} ({other.chosen}). Likely cause: it is the "
                f"address of a bridge or of a service, which each host has for itself. Next step: on both hosts, {step}"
            )


def introduce(
    exchange: Exchange,
    settings: Settings,
    *,
    socket_name: str,
    address: str,
    port: int,
    chosen: str = "",
    sizes: dict[str, int],
) -> Introduction:
    """Exchange cards and check that all ranks mean the same group. Collective.

    Args:
        socket_name, address, port, chosen, sizes: of this rank's card.

    Raises:
        ConfigError: ranks differ in version, settings or sizes, or one was given wrong ones; every rank raises, naming
            them.
        BootstrapError: a rank could not start; the exchange failed or returned something that is not the group's
            cards; or a rank listens where another one cannot reach it.
    """
    with refusing(exchange):
        key = read_key(settings.secret_file)
        mine = _card(
            exchange,
            host=_host_identity(),
            socket_name=socket_name,
            address=address,
            port=port,
            chosen=chosen,
            agreed=settings.agreed(),
            sizes=sizes,
            salt=secrets.token_bytes(SALT_BYTES) if exchange.rank == 0 else b"",
            key=fingerprint(key),
        )
    try:
        cards = tuple(
            msgspec.msgpack.decode(one, type=Card) for one in exchange.all_gather(msgspec.msgpack.encode(mine))
        )
    except msgspec.DecodeError as error:
        raise BootstrapError(
            f"rank {exchange.rank}: a rank answered with something that is not a card ({error}). Likely cause: ranks "
            "run different versions of uccl_ep_serving, or another collective runs on the same group at the same time"
        ) from error
    if len(cards) != exchange.size or [card.rank for card in cards] != list(range(exchange.size)):
        raise BootstrapError(
            f"rank {exchange.rank}: expected cards of ranks 0..{exchange.size - 1}, got {[card.rank for card in cards]}"
        )
    _check_refusals(cards)
    if words := _disagreement(cards):
        raise ConfigError(f"the ranks disagree, nothing was started: {words}. Give all ranks the same environment")
    _check_addresses(cards)
    if len(cards[0].salt) != SALT_BYTES:
        raise BootstrapError(f"rank 0 sent a salt of {len(cards[0].salt)} bytes, {SALT_BYTES} expected")
    return Introduction(cards, job_secret(key, cards[0].salt))
