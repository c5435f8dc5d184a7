"""Checks of what callers hand to normal mode: everything is refused by name before anything moves."""

from __future__ import annotations

import operator

import torch

from ..errors import ConfigError
from ..handles import DispatchOrigin, NormalHandle
from ..protocol.command import UNIT
from ..protocol.message import DTYPE_BF16, DTYPE_F16, DTYPE_F32, DTYPE_FP8, DTYPE_FP8_UE8M0, SCALE_BLOCK

__all__ = [
    "bias_pair",
    "check_alignment",
    "check_device",
    "check_experts",
    "check_handle",
    "check_integer",
    "check_layout",
    "check_origin",
    "check_topk",
    "combine_dtype",
    "combine_weights",
    "plain_dtype",
    "rows_and_scales",
]

_PLAIN = {torch.bfloat16: DTYPE_BF16, torch.float16: DTYPE_F16, torch.float32: DTYPE_F32}
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
#: Values per int32 of packed UE8M0 scales: four exponent bytes.
_PACKED_BLOCK = 4 * SCALE_BLOCK


def _words(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


_CPU = torch.device("cpu")


def check_device(device: torch.device, **tensors: torch.Tensor | None) -> None:
    """Kernels read addresses: a tensor of another device would be a wild read. Raises ConfigError."""
    for name, tensor in tensors.items():
        if tensor is not None and not isinstance(tensor, torch.Tensor):
            raise ConfigError(f"{name} must be a tensor, not {type(tensor).__name__}")
        if tensor is not None and tensor.device != device:
            raise ConfigError(f"{name} is on {tensor.device}: this Buffer serves tensors on {device} in normal mode")


def _check_rows(name: str, x: object, device: torch.device) -> torch.Tensor:
    """``x`` as a contiguous matrix on ``device`` whose rows are multiples of 16 bytes."""
    if not isinstance(x, torch.Tensor):
        raise ConfigError(f"{name} must be a tensor, not {type(x).__name__}")
    if x.device != device:
        check_device(device, **{name: x})
    if x.dim() != 2 or x.shape[1] == 0:
        raise ConfigError(f"{name} must be [tokens, hidden] with hidden > 0, not {_words(x)}")
    if not x.is_contiguous():
        raise ConfigError(f"{name} {_words(x)} must be contiguous, its strides are {x.stride()}")
    if x.shape[1] * x.element_size() % UNIT:
        raise ConfigError(
            f"{name} {_words(x)}: a row of {x.shape[1] * x.element_size()} bytes is no multiple of {UNIT} bytes"
        )
    return x


def rows_and_scales(x: object, device: torch.device = _CPU) -> tuple[torch.Tensor, torch.Tensor | None, int]:
    """Take apart dispatch's ``x``: rows, contiguous scales or None, DTYPE_*. Raises ConfigError."""
    if not isinstance(x, tuple):
        rows = _check_rows("x", x, device)
        if rows.dtype in _FLOAT8:
            raise ConfigError(f"x {_words(rows)} needs its scales: pass the pair (x, scales)")
        if rows.dtype not in _PLAIN:
            raise ConfigError(f"x {_words(rows)}: not bfloat16, float16, float32, or float8_e4m3 with scales")
        return rows, None, _PLAIN[rows.dtype]
    if len(x) != 2 or not isinstance(x[1], torch.Tensor):
        raise ConfigError("x must be a tensor or a pair (float8 rows, scales)")
    rows, scales = _check_rows("x[0]", x[0], device), x[1]
    if rows.dtype not in _FLOAT8:
        raise ConfigError(f"x[0] {_words(rows)} beside scales must be float8_e4m3")
    check_device(device, scales=scales)
    tokens, hidden = rows.shape
    if hidden % SCALE_BLOCK:
        raise ConfigError(f"hidden = {hidden}: block-scaled FP8 needs a multiple of {SCALE_BLOCK}")
    expected = {torch.float32: hidden // SCALE_BLOCK, torch.int32: -(-hidden // _PACKED_BLOCK)}
    if scales.dtype not in expected or scales.shape != (tokens, expected[scales.dtype]):
        raise ConfigError(
            f"scales must be float32[{tokens}, {expected[torch.float32]}] or packed int32[{tokens}, "
            f"{expected[torch.int32]}], not {_words(scales)}"
        )
    return rows, scales.contiguous(), DTYPE_FP8 if scales.dtype == torch.float32 else DTYPE_FP8_UE8M0


def check_topk(
    topk_idx: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    tokens: int | None,
    device: torch.device = _CPU,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Contiguous ids and weights. ``tokens`` None: only the ids are there. Ranges are checked when they are counted."""
    if topk_idx is None or (topk_weights is None and tokens is not None):
        raise ConfigError("topk_idx and topk_weights go together: give both or none")
    check_device(device, topk_idx=topk_idx, topk_weights=topk_weights)
    if topk_idx.dtype != torch.int64 or topk_idx.dim() != 2 or topk_idx.shape[1] == 0:
        raise ConfigError(f"topk_idx must be int64 [tokens, topk], not {_words(topk_idx)}")
    if topk_weights is None or tokens is None:
        return topk_idx, topk_idx
    if topk_idx.shape[0] != tokens:
        raise ConfigError(f"topk_idx {_words(topk_idx)} does not belong to the {tokens} tokens of x")
    if topk_weights.dtype != torch.float32 or topk_weights.shape != topk_idx.shape:
        raise ConfigError(f"topk_weights must be float32{list(topk_idx.shape)}, not {_words(topk_weights)}")
    return topk_idx.contiguous(), topk_weights.contiguous()


def check_layout(
    per_rank: torch.Tensor | None,
    in_rank: torch.Tensor | None,
    per_expert: torch.Tensor | None,
    tokens: int,
    ranks: int,
    device: torch.device = _CPU,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """num_tokens_per_rank, is_token_in_rank and num_tokens_per_expert, contiguous. Raises ConfigError."""
    if per_rank is None or in_rank is None or per_expert is None:
        raise ConfigError(
            "dispatch without a handle needs num_tokens_per_rank, is_token_in_rank and num_tokens_per_expert: call "
            "get_dispatch_layout first"
        )
    check_device(device, num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert)
    if per_rank.dtype != torch.int32 or per_rank.shape != (ranks,):
        raise ConfigError(f"num_tokens_per_rank must be int32[{ranks}], not {_words(per_rank)}")
    if in_rank.dtype != torch.bool or in_rank.shape != (tokens, ranks):
        raise ConfigError(f"is_token_in_rank must be bool[{tokens}, {ranks}], not {_words(in_rank)}")
    if per_expert.dtype != torch.int32 or per_expert.dim() != 1 or not per_expert.numel() or per_expert.numel() % ranks:
        raise ConfigError(
            f"num_tokens_per_expert must be int32[experts], experts a multiple of {ranks}, not {_words(per_expert)}"
        )
    return per_rank.contiguous(), in_rank.contiguous(), per_expert.contiguous()


def check_integer(name: str, value: object, least: int | None = None) -> int:
    """``value``, of NumPy or not, as a plain integer, not below ``least``. Raises ConfigError."""
    try:
        integer = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ConfigError(f"{name} = {value!r} is no integer") from None
    if least is not None and integer < least:
        raise ConfigError(f"{name} = {integer} must be at least {least}")
    return integer


def check_experts(num_experts: object, ranks: int) -> int:
    """``num_experts`` as a plain integer, a positive multiple of the ranks. Raises ConfigError."""
    experts = check_integer("num_experts", num_experts)
    if experts < 1 or experts % ranks:
        raise ConfigError(f"num_experts = {experts} must be a positive multiple of the {ranks} ranks")
    return experts


def check_alignment(expert_alignment: int, num_worst_tokens: int) -> None:
    """Raises ConfigError unless both are sensible."""
    check_integer("expert_alignment", expert_alignment)
    check_integer("num_worst_tokens", num_worst_tokens)
    if expert_alignment < 1:
        raise ConfigError(f"expert_alignment = {expert_alignment} must be at least 1")
    if num_worst_tokens < 0:
        raise ConfigError(f"num_worst_tokens = {num_worst_tokens} must not be negative")


def check_handle(handle: object, owner: object, tokens: int | None) -> None:
    """``handle`` must come from ``owner``, and (cached dispatch) from a dispatch of ``tokens`` tokens."""
    if not isinstance(handle, NormalHandle):
        raise ConfigError(f"handle must come from a normal-mode dispatch, not {type(handle).__name__}")
    check_origin(handle.origin, owner, tokens)


def check_origin(origin: DispatchOrigin, owner: object, tokens: int | None) -> None:
    """What :func:`check_handle` holds a handle of either kind to. Raises ConfigError."""
    if origin.owner is not owner:
        raise ConfigError("handle comes from another Buffer")
    if tokens is not None and origin.tokens != tokens:
        raise ConfigError(f"handle belongs to a dispatch of {origin.tokens} tokens, x has {tokens}")


def plain_dtype(x: object, device: torch.device = _CPU) -> tuple[torch.Tensor, int]:
    """Combine's ``x`` and its DTYPE_*. Raises ConfigError."""
    rows = _check_rows("x", x, device)
    if rows.dtype not in _PLAIN:
        raise ConfigError(f"x {_words(rows)}: combine takes bfloat16, float16 or float32")
    return rows, _PLAIN[rows.dtype]


def combine_dtype(x: object, handle: NormalHandle) -> int:
    """DTYPE_* of combine's ``x``, whose rows must be those of the dispatch. Raises ConfigError."""
    rows, dtype = plain_dtype(x)
    if rows.shape[0] not in (handle.received, handle.capacity):
        raise ConfigError(
            f"x {_words(rows)} must have the {handle.received} rows that the dispatch of this handle received"
        )
    return dtype


def combine_weights(topk_weights: torch.Tensor, rows: int, device: torch.device = _CPU) -> torch.Tensor:
    """Contiguous float32 [rows, K] weights to bring back. Raises ConfigError."""
    check_device(device, topk_weights=topk_weights)
    if topk_weights.dtype != torch.float32 or topk_weights.dim() != 2 or topk_weights.shape[0] != rows:
        raise ConfigError(f"topk_weights must be float32[{rows}, topk], not {_words(topk_weights)}")
    return topk_weights.contiguous()


def bias_pair(
    bias: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None, tokens: int, x: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """No, one or two biases, contiguous. Raises ConfigError."""
    if bias is None:
        return ()
    biases = bias if isinstance(bias, tuple) else (bias,)
    if len(biases) > 2:
        raise ConfigError(f"bias must be one tensor or two, not {len(biases)}")
    for one in biases:
        check_device(x.device, bias=one)
        if one.dtype != x.dtype or one.shape != (tokens, x.shape[1]):
            raise ConfigError(f"bias must be {x.dtype}[{tokens}, {x.shape[1]}], not {_words(one)}")
    return tuple(one.contiguous() for one in biases)
