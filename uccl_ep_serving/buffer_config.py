"""What DeepEP's callers ask before there is a Buffer: ``Config``, the knobs of normal mode, and hints of sizes."""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields

from .errors import ConfigError
from .gpu.program_budget import DEFAULT_SMS
from .modes.arguments import check_integer
from .protocol.layout import PAGE, LowLatencyPlan
from .protocol.message import round_up

__all__ = ["Config", "check_config", "check_num_sms", "default_config", "low_latency_size_hint"]

#: Top-k that a size hint assumes, since DeepEP's hint does not ask for it (DeepSeek-V3 and Qwen3-MoE: 8).
_HINT_TOPK = 8
#: Bytes beside the data of a token that a size hint allows for: scales, expert ids, weights.
_HINT_META = 1024


@dataclass(frozen=True)
class Config:
    """DeepEP's tuning knobs of normal mode.

    Attributes:
        num_sms: the most SMs (on GPUs: programs) that communication kernels may use, which take 24 at most; even.
        num_max_nvl_chunked_send_tokens, num_max_nvl_chunked_recv_tokens: chunking inside a node.
        num_max_rdma_chunked_send_tokens, num_max_rdma_chunked_recv_tokens: chunking between nodes.

    Chunk sizes of this package follow bytes (``UCCL_EP_CHUNK_BYTES``). All token counts are checked; those of receiving
    feed the size hints, those of sending nothing.

    Raises:
        ConfigError: a number is no integer, or makes no sense.
    """

    num_sms: int = DEFAULT_SMS
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def __post_init__(self) -> None:
        for field in fields(self):
            # NumPy's integers become plain ones: they would overflow in the hints
            object.__setattr__(self, field.name, check_integer(field.name, getattr(self, field.name)))
        check_num_sms(self.num_sms)
        for side in ("nvl", "rdma"):
            send = getattr(self, f"num_max_{side}_chunked_send_tokens")
            recv = getattr(self, f"num_max_{side}_chunked_recv_tokens")
            if not 0 < send <= recv:
                raise ConfigError(f"num_max_{side}_chunked: send tokens {send} must be in 1..recv tokens {recv}")

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes of window worth having for received rows of ``hidden_bytes``; smaller ones work, in rounds."""
        return _rows_hint(self.num_max_nvl_chunked_recv_tokens, hidden_bytes, num_ranks)

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """The same for ranks on other nodes; 0 is never returned, because one node needs no special case here."""
        return _rows_hint(self.num_max_rdma_chunked_recv_tokens, hidden_bytes, num_ranks)


def _rows_hint(tokens: int, hidden_bytes: int, num_ranks: int) -> int:
    row = check_integer("hidden_bytes", hidden_bytes, 0) + _HINT_META
    return round_up(check_integer("num_ranks", num_ranks, 1) * tokens * row, 4096)


def check_num_sms(num_sms: object) -> int:
    """``num_sms`` as a plain integer. Raises ConfigError unless it is even and not negative."""
    value = check_integer("num_sms", num_sms)
    if value < 0 or value % 2:
        raise ConfigError(f"num_sms = {value} must be even and not negative")
    return value


def check_config(config: object) -> None:
    """Raise ConfigError unless ``config`` is one, or None."""
    if config is not None and not isinstance(config, Config):
        raise ConfigError(f"config must be a uccl_ep_serving.Config, not {type(config).__name__}")


@functools.cache
def default_config(num_sms: int) -> Config:
    """What an operation that is given none asks for: every one does."""
    return Config(num_sms)


def low_latency_size_hint(tokens: int, hidden: int, ranks: int, experts: int) -> int:
    """Window bytes for low latency with 2-byte values and top-8.

    Args:
        tokens: most tokens a rank dispatches at once.

    Raises:
        ConfigError: impossible shapes.
    """
    try:
        plan = LowLatencyPlan(ranks, tokens, hidden, experts, min(_HINT_TOPK, check_integer("experts", experts)), 2)
    except ValueError as error:
        raise ConfigError(f"low-latency size hint: {error}") from error
    return round_up(plan.room.nbytes, PAGE)
