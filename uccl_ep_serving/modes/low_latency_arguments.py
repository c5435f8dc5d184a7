"""Checks of what the caller of low-latency mode passes: everything wrong is a ConfigError before anything moves."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from ..errors import ConfigError
from ..handles import LowLatencyHandle
from ..protocol.command import MAX_WRITE_BYTES
from ..protocol.layout import LowLatencyPlan
from ..protocol.message import DTYPE_FP8, DTYPE_FP8_UE8M0, SCALE_BLOCK, element_bytes, row_bytes
from .arguments import VALUE_CODES, check_memory, in_words, is_tensor

__all__ = [
    "UE8M0_BLOCK",
    "Coding",
    "check_combine",
    "check_dispatch",
    "check_finish",
    "check_reserve",
    "check_ring",
    "check_stats",
    "check_zero_copy",
    "combine_coding",
    "dispatch_coding",
    "dispatch_key",
]

#: UE8M0 scales leave packed four to an int32, as in DeepEP.
UE8M0_BLOCK = 4 * SCALE_BLOCK


@dataclass(frozen=True, slots=True)
class Coding:
    """How rows travel.

    Attributes:
        dtype: DTYPE_* of ``protocol.message``.
        payload: bytes of a row's values.
        row: bytes of a row on the wire: values, scales, round-up to 16.
        output: torch dtype of the values.
    """

    dtype: int
    payload: int
    row: int
    output: torch.dtype

    @property
    def quantised(self) -> bool:
        """True for FP8."""
        return self.dtype in (DTYPE_FP8, DTYPE_FP8_UE8M0)


def dispatch_coding(x: torch.Tensor, use_fp8: bool, round_scale: bool, use_ue8m0: bool) -> Coding:
    """How ``x`` travels; without ``use_fp8`` the other flags count for nothing, as in DeepEP. Raises ConfigError for a
    combination of flags and hidden size that has no format."""
    hidden = x.shape[1]
    if not use_fp8:
        code = VALUE_CODES[x.dtype]
        return Coding(code, hidden * x.element_size(), row_bytes(hidden, code), x.dtype)
    if use_ue8m0 and not round_scale:
        raise ConfigError("low-latency dispatch: use_ue8m0=True needs round_scale=True, as in DeepEP")
    block = UE8M0_BLOCK if use_ue8m0 else SCALE_BLOCK
    if hidden % block:
        raise ConfigError(f"low-latency dispatch: hidden = {hidden} must be a multiple of {block} for this FP8 format")
    code = DTYPE_FP8_UE8M0 if use_ue8m0 else DTYPE_FP8
    return Coding(code, hidden, row_bytes(hidden, code), torch.float8_e4m3fn)


def combine_coding(x: torch.Tensor) -> Coding:
    """How the experts' rows travel back."""
    hidden, code = x.shape[2], VALUE_CODES[x.dtype]
    return Coding(code, hidden * x.element_size(), row_bytes(hidden, code), x.dtype)


# typed: 8.0 is no number of tokens, also where 8 was one before
@functools.lru_cache(maxsize=256, typed=True)
def _known_plan(*sizes: int) -> LowLatencyPlan:
    return LowLatencyPlan(*sizes)


def _plan(where: str, *sizes: int) -> LowLatencyPlan:
    """The plan of these sizes. Raises ConfigError when there can be none."""
    try:
        return _known_plan(*sizes)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{where}: {error}") from None


def check_dispatch(
    ranks: int,
    x: object,
    topk_idx: object,
    tokens: int,
    experts: int,
    topk_weights: object,
) -> LowLatencyPlan:
    """The plan that a dispatch of these arguments needs. Contents of tensors are not looked at.

    Raises:
        ConfigError: shapes, dtypes, devices or sizes are wrong.
    """
    where = "low-latency dispatch"
    if not isinstance(x, torch.Tensor) or x.dim() != 2 or x.dtype not in VALUE_CODES:
        raise ConfigError(f"{where}: x must be [tokens, hidden] in bfloat16, float16 or float32, not {in_words(x)}")
    if not x.is_contiguous():
        raise ConfigError(f"{where}: x {in_words(x)} must be contiguous, its strides are {x.stride()}")
    count = x.shape[0]
    if not isinstance(topk_idx, torch.Tensor) or topk_idx.dtype != torch.int64 or topk_idx.dim() != 2:
        raise ConfigError(f"{where}: topk_idx must be int64 [tokens, topk], not {in_words(topk_idx)}")
    if topk_idx.shape[0] != count:
        raise ConfigError(f"{where}: x has {count} tokens and topk_idx {topk_idx.shape[0]}")
    if topk_weights is not None and not is_tensor(topk_weights, torch.float32, topk_idx.shape):
        raise ConfigError(
            f"{where}: topk_weights must be float32{list(topk_idx.shape)} like topk_idx, not {in_words(topk_weights)}"
        )
    for name, tensor in (("topk_idx", topk_idx), ("topk_weights", topk_weights)):
        if isinstance(tensor, torch.Tensor) and tensor.device != x.device:
            raise ConfigError(f"{where}: x is on {x.device} and {name} on {tensor.device}")
    plan = _plan(where, ranks, tokens, x.shape[1], experts, topk_idx.shape[1], x.element_size())
    if count > plan.tokens:
        raise ConfigError(
            f"{where}: {count} tokens exceed num_max_dispatch_tokens_per_rank = {tokens}. Raise that number on all "
            "ranks, or use normal mode, which takes any count"
        )
    return plan


def dispatch_key(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None,
    sizes: tuple[int, int],
    flags: tuple[bool, bool, bool],
) -> tuple[object, ...] | None:
    """All that :func:`check_dispatch` and :func:`dispatch_coding` look at, for who has seen the same before; None for
    what they must look at again.

    Args:
        sizes: tokens and experts.
        flags: use_fp8, round_scale, use_ue8m0.
    """
    tokens, experts = sizes
    # 8.0 equals 8 and is no number of tokens; strides are not in the key
    if type(tokens) is not int or type(experts) is not int or type(x) is not torch.Tensor or not x.is_contiguous():
        return None
    if type(topk_idx) is not torch.Tensor:
        return None
    key = (sizes, flags, x.shape, x.dtype, x.device, topk_idx.shape, topk_idx.dtype, topk_idx.device)
    if topk_weights is None:
        return key
    if type(topk_weights) is not torch.Tensor:
        return None
    return (*key, topk_weights.shape, topk_weights.dtype, topk_weights.device)


def check_reserve(
    ranks: int, tokens: int, hidden: int, experts: int, topk: int, dtype: torch.dtype
) -> tuple[LowLatencyPlan, torch.Tensor]:
    """The plan of dispatches of such sizes, and tokens as one of them takes them: none.

    Raises:
        ConfigError: no dispatch can have these sizes.
    """
    where = "reserve_low_latency"
    if dtype not in VALUE_CODES:
        raise ConfigError(f"{where}: dtype must be bfloat16, float16 or float32, not {dtype!r}")
    plan = _plan(where, ranks, tokens, hidden, experts, topk, dtype.itemsize)
    return plan, torch.empty(0, plan.hidden, dtype=dtype, device="cpu")


def check_finish(phase: str, async_finish: bool, return_recv_hook: bool) -> None:
    """An event stands for a whole operation, a hook for its second half. Raises ConfigError."""
    if async_finish and return_recv_hook:
        raise ConfigError(f"{phase}: async_finish and return_recv_hook exclude each other")


def check_ring(plan: LowLatencyPlan, channels: int, ring_slots: int) -> None:
    """A piece of a message enters its ring as a whole: refuse a plan whose longest one never would.

    Raises:
        ConfigError: a message of ``plan`` needs more commands per channel than a ring holds.
    """
    longest = plan.room.longest_message
    commands = -(-longest // (channels * MAX_WRITE_BYTES))
    if commands > ring_slots:
        raise ConfigError(
            f"low-latency dispatch: messages of {plan} have up to {longest} bytes, {commands} commands on each of "
            f"{channels} channels, and a ring holds {ring_slots}. Next step: raise "
            "UCCL_EP_RING_SLOTS on all ranks"
        )


def check_stats(name: str, stats: torch.Tensor | None, dtype: torch.dtype, length: int, device: torch.device) -> int:
    """Address of an optional tensor of ``length`` counters, 0 for None.

    Args:
        device: where kernels write it.

    Raises:
        ConfigError: it is not what kernels can count in.
    """
    if stats is None:
        return 0
    if not is_tensor(stats, dtype, (length,)) or not stats.is_contiguous():
        raise ConfigError(f"{name} must be {str(dtype).removeprefix('torch.')}[{length}], not {in_words(stats)}")
    if stats.device != device:
        raise ConfigError(f"{name} is on {stats.device} and the tokens on {device}")
    return check_memory(name, stats)


def check_zero_copy(x: torch.Tensor, buffer: torch.Tensor | None) -> None:
    """Raise ConfigError unless ``x`` is the ``buffer`` for the experts' output, which DeepEP sends in its place."""
    if buffer is None or x.data_ptr() != buffer.data_ptr():
        raise ConfigError(
            "low-latency combine: zero_copy=True, and x is not what get_next_low_latency_combine_buffer returned for "
            "this shape and dtype. Next step: give that tensor as x, or leave zero_copy out"
        )


def check_combine(
    plan: LowLatencyPlan,
    handle: LowLatencyHandle,
    x: object,
    topk_idx: object,
    topk_weights: object,
    out: object,
) -> None:
    """Check what a combine gets against its dispatch.

    Raises:
        ConfigError: shapes, dtypes, ids or weights do not fit the dispatch.
    """
    where = "low-latency combine"
    shape = (plan.local_experts, plan.ranks * plan.tokens, plan.hidden)
    if not isinstance(x, torch.Tensor) or x.dtype not in VALUE_CODES or x.shape != shape:
        raise ConfigError(f"{where}: x must be {list(shape)} in bfloat16, float16 or float32, not {in_words(x)}")
    if not x.is_contiguous():
        raise ConfigError(f"{where}: x {in_words(x)} must be contiguous, its strides are {x.stride()}")
    if element_bytes(VALUE_CODES[x.dtype]) > plan.element:
        raise ConfigError(
            f"{where}: x has {x.element_size()}-byte values, space was planned at dispatch for {plan.element}-byte "
            "ones: return the experts' output in a dtype as narrow as the dispatched tokens'"
        )
    sent = handle.topk_idx
    for name, tensor in (("x", x), ("topk_idx", topk_idx), ("topk_weights", topk_weights), ("out", out)):
        if isinstance(tensor, torch.Tensor) and tensor.device != sent.device:
            raise ConfigError(f"{where}: {name} is on {tensor.device}, and the dispatch was on {sent.device}")
    # contents are compared on the CPU only: a GPU would have to be waited for, and could not be captured in a graph
    on_cpu = x.device.type == "cpu"
    if not isinstance(topk_idx, torch.Tensor) or not is_tensor(topk_idx, torch.int64, sent.shape):
        raise ConfigError(f"{where}: topk_idx {in_words(topk_idx)} differs from the one at dispatch, {in_words(sent)}")
    if on_cpu and not torch.equal(topk_idx, sent):
        token, slot = (topk_idx != sent).nonzero()[0].tolist()
        raise ConfigError(
            f"{where}: topk_idx[{token}, {slot}] is {int(topk_idx[token, slot])}, and was {int(sent[token, slot])} at "
            "dispatch. Next step: give the same ids; to leave an expert out, give it the weight 0 "
            "and its rows finite values"
        )
    if not isinstance(topk_weights, torch.Tensor) or not is_tensor(topk_weights, torch.float32, sent.shape):
        raise ConfigError(f"{where}: topk_weights must be float32{list(sent.shape)}, not {in_words(topk_weights)}")
    # as bits: engines pad batches with rows whose weights are NaN, and NaN equals nothing
    if (
        on_cpu
        and handle.topk_weights is not None
        and not torch.equal(topk_weights.contiguous().view(torch.int32), handle.topk_weights.view(torch.int32))
    ):
        raise ConfigError(
            f"{where}: topk_weights differ from those at dispatch, with which the rows have been summed already: pass "
            "the same, or none at dispatch"
        )
    expected = (sent.shape[0], plan.hidden)
    if out is None:
        return
    if not isinstance(out, torch.Tensor) or not is_tensor(out, x.dtype, expected) or not out.is_contiguous():
        raise ConfigError(f"{where}: out must be contiguous {list(expected)} in {x.dtype}, not {in_words(out)}")
