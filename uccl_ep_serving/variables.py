"""The ``UCCL_EP_*`` variables: what each may be and what it means, one after another as docs/settings.md has them.

:mod:`.config` reads them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from .protocol.streams import NORMAL_CHANNELS

__all__ = ["LEAST_IN_FLIGHT", "PREFIX", "SETTINGS", "Variable"]

PREFIX = "UCCL_EP_"
#: Least value of ``bytes_in_flight`` and ``peer_bytes_in_flight``.
LEAST_IN_FLIGHT = 4096


def _integer(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text, 0)
        except ValueError:
            raise ValueError("must be a whole number without leading zeros, as 8 or 0x8") from None
        if not low <= value <= high:
            raise ValueError(f"must be in {low}..{high}")
        return value

    return parse


def _power_of_two(low: int, high: int) -> Callable[[str], int]:
    bounded = _integer(low, high)

    def parse(text: str) -> int:
        value = bounded(text)
        if value & (value - 1):
            raise ValueError("must be a power of two")
        return value

    return parse


def _size(low: int, high: int) -> Callable[[str], int]:
    """Bytes, with an optional K, M or G (powers of 1024), rounded up to 4096."""

    def parse(text: str) -> int:
        shift = {"K": 10, "M": 20, "G": 30}.get(text[-1:].upper(), 0)
        try:
            value = int(text[:-1] if shift else text, 0) << shift
        except ValueError:
            raise ValueError("must be a whole number of bytes, or of K, M or G (powers of 1024), as 512M") from None
        if not low <= value <= high:
            raise ValueError(f"must be in {low}..{high} bytes")
        return -(-value // 4096) * 4096

    return parse


def _number(text: str, unit: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"must be a number of {unit}") from None


def _seconds(low: float, high: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = _number(text, "seconds")
        if not low <= value <= high:
            raise ValueError(f"must be in {low}..{high} seconds")
        return value

    return parse


def _choice(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}")
        return text

    return parse


def _ports(text: str) -> tuple[int, int]:
    """``"20000-20100"``."""
    named = re.fullmatch(r"\s*(\d+)\s*-\s*(\d+)\s*", text)
    if named is None:
        raise ValueError("must be the first and the last port of a range, as 20000-20100")
    first, last = map(int, named.groups())
    if not 1 <= first <= last <= 65535:
        raise ValueError("must be ports in 1..65535, the smaller one first")
    return first, last


def _flag(text: str) -> bool:
    try:
        return {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}[text.lower()]
    except KeyError:
        raise ValueError("must be 1 or 0") from None


def _spin(text: str) -> str:
    """``"auto"``, ``"off"`` or milliseconds."""
    if text in ("auto", "off"):
        return text
    try:
        milliseconds = float(text)
    except ValueError:
        raise ValueError("must be auto, off or a number of milliseconds") from None
    if not 0 <= milliseconds <= 1e6:
        raise ValueError("must be auto, off or in 0..1000000 milliseconds")
    return f"{milliseconds:g}" if milliseconds else "off"


#: What a Linux kernel is configured for at most (CONFIG_NR_CPUS of x86-64).
_MOST_CPUS = 8192


def _cpus(text: str) -> tuple[int, ...]:
    """``"4,5"`` or ``"4-7"`` or empty."""
    cpus: list[int] = []
    for part in filter(None, text.split(",")):
        if not (named := re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)):
            raise ValueError(f"{part!r} is no core and no range of cores: write them as 4,5 or 4-7")
        first, last = named.groups()
        found = range(int(first), int(last or first) + 1)
        if not found:
            raise ValueError(f"{part} names no core")
        if found[-1] >= _MOST_CPUS:
            raise ValueError(f"{part} names a core beyond {_MOST_CPUS - 1}")
        cpus.extend(found)
    return tuple(cpus)


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable.

    Attributes:
        field: attribute of :class:`Settings`.
        parse: text -> value, raising ValueError.
        agreed: all ranks must have the same value.
        meaning: one line for the documentation.
        fallback: variable of NCCL that is read where ours is not set.
        group: part of docs/settings.md in which it stands.
    """

    field: str
    parse: Callable[[str], Any]
    agreed: bool
    meaning: str
    fallback: str = ""
    group: Literal["everyday", "nic", "debug"] = "everyday"

    @property
    def name(self) -> str:
        """Name of the environment variable."""
        return PREFIX + self.field.upper()

    def source(self, environment: Mapping[str, str]) -> str:
        """The variable of ``environment`` that decides: ours, else NCCL's; "" where neither is set (or is empty)."""
        return next((name for name in (self.name, self.fallback) if environment.get(name)), "")


SETTINGS: tuple[Variable, ...] = (
    Variable(
        "transport",
        _choice("auto", "shm", "tcp", "efa", "roce"),
        True,
        "transport to peers whose windows the kernels do not write themselves: auto, shm, tcp, efa or roce. auto: shm "
        "on one host; between hosts efa or roce where both ranks have such NICs on one fabric, else tcp",
    ),
    Variable(
        "direct",
        _flag,
        True,
        "1: kernels write the windows of peers on the same host; 0: every peer goes through proxies",
    ),
    Variable(
        "hierarchy",
        _choice("auto", "off"),
        True,
        "normal mode between nodes (groups of ranks that write each other's windows). auto: where all nodes are equal "
        "groups of consecutive ranks, a row crosses once to each node and is forwarded there, and combine sums inside "
        "the node first; off: a row goes once to each rank",
    ),
    Variable(
        "node_ranks",
        _integer(0, 4096),
        True,
        "simulated nodes, for tests: groups of this many consecutive ranks; only ranks of one group write each "
        "other's windows in host memory. 0: real nodes",
        group="debug",
    ),
    Variable(
        "device",
        _choice("auto", "cpu", "cuda", "interpreter"),
        True,
        "tensors that a Buffer serves, in both modes. auto: the kind of the first tensor that it is given; cpu; cuda: "
        "CUDA or ROCm; interpreter: the GPU kernels on CPU tensors in Triton's interpreter, for debugging (needs "
        "TRITON_INTERPRET=1)",
    ),
    Variable(
        "gpu_check",
        _flag,
        False,
        "1: an engine that starts on GPUs which have no check on record for this driver, Triton and version runs "
        "`uccl-ep check --gpu` first, two minutes at most; 0: it refuses instead. UCCL_EP_DEVICE=cuda skips both",
    ),
    Variable(
        "window",
        _choice("auto", "host", "device"),
        True,
        "where the windows of a GPU Buffer lie. host: pinned memory, which every transport reaches; device: GPU "
        "memory, which peers on this host map (CUDA IPC) and NICs reach by GPUDirect; auto: device where every other "
        "rank is on this host or reached by NICs that write GPU memory, else host with a warning that says why",
    ),
    Variable("proxies", _integer(1, 16), True, "proxy threads per Buffer"),
    Variable(
        "channels",
        _integer(0, 16),
        True,
        "channels that a message is striped over, at least the number of proxies; 0: as many as two ranks have NICs "
        "between them, so that each NIC carries its part",
    ),
    Variable(
        "deterministic",
        _flag,
        True,
        "1: low-latency dispatch gives an expert its rows by source rank, whatever arrives first; 0: those of each "
        "source as they come. Combined tokens are the same to the bit",
    ),
    Variable("timeout", _seconds(0.05, 86400), False, "seconds that a wait for a peer may last before PeerTimeout"),
    Variable(
        "connect_timeout",
        _seconds(0.05, 86400),
        False,
        "seconds that bootstrap, connecting and rebuilding windows may last",
    ),
    Variable(
        "ring_slots",
        _power_of_two(2, 1 << 20),
        False,
        "commands that a ring holds; a power of two",
        group="debug",
    ),
    Variable(
        "quantum",
        _size(4096, 256 << 20),
        False,
        "bytes of the largest single write; the proxy splits longer commands",
        group="debug",
    ),
    Variable(
        "bytes_in_flight",
        _size(LEAST_IN_FLIGHT, 1 << 40),
        False,
        "bytes posted and not completed, per proxy",
        group="debug",
    ),
    Variable(
        "peer_bytes_in_flight",
        _size(LEAST_IN_FLIGHT, 1 << 40),
        False,
        "the same per peer, so that a slow peer leaves room for the others; where it is not set, at most half of "
        "UCCL_EP_BYTES_IN_FLIGHT",
        group="debug",
    ),
    Variable(
        "writes_in_flight",
        _integer(1, 1 << 16),
        False,
        "writes posted and not completed, per proxy",
        group="debug",
    ),
    Variable(
        "heap_bytes",
        _size(0, 1 << 40),
        True,
        "bytes of window into which normal mode receives rows in place; on GPUs, with round_bytes, of the rings that "
        "rows land in",
    ),
    Variable(
        "round_bytes",
        _size(4096, 1 << 40),
        True,
        "bytes of window into which normal mode receives rows in rounds, when the heap has no room; on GPUs see "
        "heap_bytes",
    ),
    Variable(
        "chunk_bytes",
        _size(4096, 256 << 20),
        True,
        "bytes of one chunk of normal mode; on GPUs, of a message at most",
        group="debug",
    ),
    Variable(
        "chunk_depth",
        _integer(1, 64),
        True,
        "chunks in flight per destination in normal mode; on GPUs, times chunk_bytes, bytes of staging per destination",
        group="debug",
    ),
    Variable(
        "programs",
        _integer(0, NORMAL_CHANNELS),
        True,
        "GPU programs (SMs) of normal mode, each of which serves a channel: at most `Config.num_sms` (20 where the "
        "caller says nothing) and 24; 0: as many as that",
    ),
    Variable(
        "copy",
        _choice("auto", "triton", "tma"),
        False,
        "what moves rows of normal mode between GPUs that map each other's memory; tma: bulk copies of the tensor "
        "memory accelerator (sm_90 or sm_100, CuPy, at most 256 ranks), on one H200 faster in some operations and "
        "slower in others: auto is triton",
    ),
    Variable("tcp_connections", _integer(1, 16), True, "TCP connections per peer and proxy"),
    Variable(
        "tcp_auth",
        _flag,
        True,
        "1: each frame over tcp carries a MAC (AES-256-GMAC, by OpenSSL's libcrypto) and counts only when it is right, "
        "for networks on which others can alter traffic. Nothing is encrypted",
    ),
    Variable(
        "socket_ifname",
        str,
        False,
        "network interfaces whose address peers connect to, in the syntax of NCCL_SOCKET_IFNAME; not set: that of the "
        "route to the process group's store, else GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME, the route to MASTER_ADDR, or "
        "a guess that is said with a warning",
    ),
    Variable(
        "secret_file",
        str,
        False,
        "file with a key that all ranks have, from which the job's secret is made; not set: rank 0 makes the secret, "
        "and whoever reads the process group's traffic or its store while the ranks meet knows it",
    ),
    Variable(
        "port_range",
        _ports,
        False,
        "ports on which ranks listen, as 20000-20100, for networks that let only some pass: 1 for each rank of a host, "
        "and over tcp 1 more for each of its proxies; not set: any free port",
    ),
    Variable(
        "nics",
        str,
        False,
        "RDMA devices to use, in the syntax of NCCL_IB_HCA (mlx5_0,mlx5_3 or ^mlx5_bond or =efa_0); not set: "
        "NCCL_IB_HCA for the devices that NCCL drives itself (not EFA), else those nearest to the GPU",
        group="nic",
    ),
    Variable(
        "nic_gid_index",
        _integer(-1, 1023),
        False,
        "index of the GID of RoCE NICs, else NCCL_IB_GID_INDEX; -1: the first routable RoCE v2 entry",
        fallback="NCCL_IB_GID_INDEX",
        group="nic",
    ),
    Variable(
        "nic_pkey_index",
        _integer(0, 65535),
        False,
        "index of the partition key among those of the port, else NCCL_IB_PKEY",
        fallback="NCCL_IB_PKEY",
        group="nic",
    ),
    Variable(
        "nic_traffic_class",
        _integer(-1, 255),
        False,
        "traffic class (DSCP x 4) of RDMA packets, else NCCL_IB_TC; -1: the default of the NIC's family",
        fallback="NCCL_IB_TC",
        group="nic",
    ),
    Variable(
        "nic_service_level",
        _integer(-1, 15),
        False,
        "service level (priority) of RDMA packets, else NCCL_IB_SL; -1: the default of the NIC's family",
        fallback="NCCL_IB_SL",
        group="nic",
    ),
    Variable(
        "nic_timeout",
        _integer(1, 31),
        False,
        "acknowledgement timeout of RoCE, 4.096 us x 2^n, else NCCL_IB_TIMEOUT",
        fallback="NCCL_IB_TIMEOUT",
        group="nic",
    ),
    Variable(
        "nic_retries",
        _integer(-1, 7),
        False,
        "how often a RoCE NIC sends an unacknowledged packet again before the peer counts as lost, else "
        "NCCL_IB_RETRY_CNT; -1: the default of the NIC's family, 7 (soft-RoCE: 6)",
        fallback="NCCL_IB_RETRY_CNT",
        group="nic",
    ),
    Variable(
        "nic_qps",
        _integer(1, 8),
        True,
        "queue pairs (QPs) per peer and proxy on RoCE; writes go to them round-robin, for networks that spread load "
        "by flow",
        group="nic",
    ),
    Variable(
        "nic_bytes_in_flight",
        _size(0, 1 << 40),
        False,
        "bytes posted and not completed, per NIC; 0: the default of the NIC's family",
        group="nic",
    ),
    Variable(
        "nic_flush",
        _choice("auto", "read"),
        True,
        "flush of what NICs wrote into GPU memory, before kernels are told of it. auto: by the driver, on GPUs that "
        "need one; read: each NIC reads a word of that memory back (roce), for AMD GPUs that see arrivals too early",
        group="nic",
    ),
    Variable(
        "verbs",
        _choice("auto", "pyverbs", "ctypes"),
        False,
        "who makes the objects of verbs (device, PD, MR, CQ, QP, AH): pyverbs, or ctypes; auto: pyverbs where it is "
        "installed and matches rdma-core. The data path is the same",
        group="nic",
    ),
    Variable(
        "proxy_cpus",
        _cpus,
        False,
        "cores for the proxy threads of all ranks of a host, dealt in rank order, as 4,5 or 4-7; not set: those near "
        "the NIC that a proxy drives, any without a NIC",
        group="nic",
    ),
    Variable(
        "proxy_spin",
        _spin,
        False,
        "how long an idle proxy keeps polling before it sleeps. auto: 10 ms where there are at least four cores "
        "(near its NIC) for each proxy of the host that shares them, else off; off: it yields at once and sleeps after "
        "50 us; or milliseconds",
    ),
    Variable(
        "flight_recorder",
        str,
        False,
        "directory into which a rank that cannot go on writes what it knew, a file for each rank and failure; uccl-ep "
        "flight reads those of all ranks",
    ),
    Variable(
        "trace",
        str,
        False,
        "directory into which each rank records the experts that its tokens chose, to compare backends with that "
        "routing (docs/architecture/formats.md); at most 256 MiB a rank and start",
    ),
    Variable(
        "trace_every",
        _integer(1, 1 << 30),
        False,
        "of so many dispatches of a layer one is recorded, of all layers and ranks the same ones",
    ),
    Variable(
        "trace_what",
        _choice("histogram", "whole"),
        False,
        "what is recorded. histogram: how often each expert of a layer was chosen; whole: the ids of every token",
    ),
    Variable(
        "advice",
        _flag,
        False,
        "1: at the first operation of a shape the log says what a comparison has measured of it on this machine: "
        "whether the engine's own collectives serve it better, and by how much",
    ),
    Variable(
        "fault_proxy_after",
        _integer(0, 1 << 40),
        False,
        "fault injection for tests: the first proxy dies after this many commands; 0: never",
        group="debug",
    ),
)
