"""What callers of normal mode pass, on CPU and GPU alike: checked, with the format that all ranks must agree on.

Everything wrong is a ConfigError before anything moves.
"""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

import torch

from ..errors import ConfigError
from ..handles import NormalGpuHandle, NormalHandle
from ..protocol.command import UNIT
from ..protocol.message import DTYPE_FP8, DTYPE_FP8_UE8M0, MOST_TOKENS, SCALE_BLOCK, NormalNotify
from .arguments import VALUE_CODES, check_device, check_integer, check_memory, check_start, in_words, naming
from .row_format import RowFormat

__all__ = ["CombineArguments", "DispatchArguments", "Layout", "NormalArguments", "check_experts", "check_ids"]

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
#: Values per int32 of packed UE8M0 scales: four exponent bytes.
_PACKED_BLOCK = 4 * SCALE_BLOCK

_Handle = TypeVar("_Handle", NormalHandle, NormalGpuHandle)


class Layout(NamedTuple):
    """Who gets which tokens, as the caller has counted it; all tensors are contiguous. T tokens, R ranks, E experts.

    Attributes:
        per_rank: int32 [R], tokens for each rank.
        in_rank: bool [T, R], which tokens go there.
        per_expert: int32 [E], tokens for each expert.
    """

    per_rank: torch.Tensor
    in_rank: torch.Tensor
    per_expert: torch.Tensor


class DispatchArguments(NamedTuple, Generic[_Handle]):
    """Of a dispatch of T tokens to R ranks. Tensors are contiguous.

    Attributes:
        form: what all ranks must agree on, but for the way between nodes.
        rows: [T, hidden].
        scales: of float8 rows, [T, ...], or None.
        topk_idx, topk_weights: int64 and float32 [T, K], both or none.
        layout: None from a handle.
        handle: what a cached dispatch takes its layout from, or None.
        copies: most ranks that a token goes to.
    """

    form: RowFormat
    rows: torch.Tensor
    scales: torch.Tensor | None
    topk_idx: torch.Tensor | None
    topk_weights: torch.Tensor | None
    layout: Layout | None
    handle: _Handle | None
    copies: int

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What is moved."""
        return [self.rows, *(one for one in (self.scales, self.topk_idx, self.topk_weights) if one is not None)]


class CombineArguments(NamedTuple, Generic[_Handle]):
    """Of a combine. Tensors are contiguous.

    Attributes:
        form: what all ranks must agree on, but for the way between nodes.
        rows: [rows of the dispatch, hidden].
        topk_weights: float32 [rows of the dispatch, K], or None.
        biases: none, one or two, [tokens, hidden] of the dtype of ``rows``.
        handle: of the dispatch.
    """

    form: RowFormat
    rows: torch.Tensor
    topk_weights: torch.Tensor | None
    biases: tuple[torch.Tensor, ...]
    handle: _Handle


class NormalArguments(Generic[_Handle]):
    """What one Buffer's normal mode takes.

    Args:
        rank, ranks: this rank, and those of the group.
        device: of the tensors.
        handles: class of the handles.
        aligned: kernels move 16 bytes at a time, and so tensors must start.
    """

    def __init__(self, rank: int, ranks: int, device: torch.device, handles: type[_Handle], aligned: bool) -> None:
        self._rank, self._ranks, self._device, self._aligned = rank, ranks, device, aligned
        self._handles: type[_Handle] = handles

    @naming("normal dispatch")
    def dispatch(
        self,
        x: object,
        handle: object,
        layout: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
        topk_idx: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        expert_alignment: int,
        num_worst_tokens: int,
    ) -> DispatchArguments[_Handle]:
        """Take apart what dispatch is given. Contents of tensors are not looked at. Raises ConfigError.

        Args:
            layout: num_tokens_per_rank, is_token_in_rank and num_tokens_per_expert.
        """
        rows, scales, dtype = self._rows_and_scales(x)
        tokens, hidden = rows.shape
        if tokens > MOST_TOKENS:
            raise ConfigError(f"x {in_words(rows)}: a rank dispatches at most {MOST_TOKENS} tokens at once")
        scale_bytes = 0 if scales is None else scales.shape[1] * scales.element_size()
        row_bytes = hidden * rows.element_size()
        if handle is not None:
            # a layout and num_worst_tokens come from the handle: what is given besides counts for nothing, as in DeepEP
            known = self._check_handle(handle, tokens)
            if topk_idx is not None or topk_weights is not None:
                raise ConfigError("a cached dispatch takes no topk_idx and topk_weights: the handle says where rows go")
            kind, origin = NormalNotify.OPERATION_CACHED_DISPATCH, known.about.origin
            form = RowFormat(kind, dtype, hidden, row_bytes, scale_bytes=scale_bytes, origin=origin)
            return DispatchArguments(form, rows, scales, None, None, None, known, self._ranks)
        _check_alignment(expert_alignment, num_worst_tokens)
        counted, topk = self._check_layout(layout, tokens), 0
        if topk_idx is not None or topk_weights is not None:
            topk_idx, topk_weights = _check_topk(topk_idx, topk_weights, tokens, self._device)
            topk = topk_idx.shape[1]
        kind, local_experts = NormalNotify.OPERATION_DISPATCH, counted.per_expert.shape[0] // self._ranks
        form = RowFormat(kind, dtype, hidden, row_bytes, topk, scale_bytes, local_experts)
        copies = min(topk or self._ranks, self._ranks)
        return DispatchArguments(form, rows, scales, topk_idx, topk_weights, counted, None, copies)

    @naming("normal combine")
    def combine(
        self,
        x: object,
        handle: object,
        topk_weights: torch.Tensor | None,
        bias: torch.Tensor | tuple[torch.Tensor | None, torch.Tensor | None] | None,
    ) -> CombineArguments[_Handle]:
        """Take apart what combine is given. Raises ConfigError."""
        known = self._check_handle(handle, None)
        rows = self._check_rows("x", x)
        if rows.dtype not in VALUE_CODES:
            raise ConfigError(f"x {in_words(rows)}: combine takes bfloat16, float16 or float32")
        if rows.shape[0] not in known.rows_returned:
            raise ConfigError(
                f"x {in_words(rows)} must have the {known.rows_returned[0]} rows that the dispatch of this handle "
                "returned"
            )
        hidden = rows.shape[1]
        biases = self._biases(bias, known.about.tokens, rows)
        topk = 0
        if topk_weights is not None:
            check_device(self._device, topk_weights=topk_weights)
            shape = topk_weights.shape
            if topk_weights.dtype != torch.float32 or len(shape) != 2 or shape[0] != rows.shape[0]:
                raise ConfigError(f"topk_weights must be float32[{rows.shape[0]}, topk], not {in_words(topk_weights)}")
            topk_weights, topk = topk_weights.contiguous(), topk_weights.shape[1]
        kind, dtype, origin = NormalNotify.OPERATION_COMBINE, VALUE_CODES[rows.dtype], known.about.origin
        form = RowFormat(kind, dtype, hidden, hidden * rows.element_size(), topk, origin=origin)
        return CombineArguments(form, rows, topk_weights, biases, known)

    def _check_handle(self, handle: object, tokens: int | None) -> _Handle:
        """``handle`` must come from a dispatch of this rank and as many, and (cached dispatch) of ``tokens`` tokens."""
        known = self._again(handle)
        if known is None:
            raise ConfigError(f"handle must come from a normal-mode dispatch on {self._device}, not {in_words(handle)}")
        about = known.about
        if (about.rank, about.ranks) != (self._rank, self._ranks):
            raise ConfigError(
                f"handle comes from rank {about.rank} of {about.ranks}, and this is rank {self._rank} of {self._ranks}"
            )
        if tokens is not None and about.tokens != tokens:
            raise ConfigError(f"handle belongs to a dispatch of {about.tokens} tokens, x has {tokens}")
        return known

    def _again(self, handle: object) -> _Handle | None:
        """``handle``, also where it is the tensors of one (``ctx.saved_tensors``); None for anything else."""
        if isinstance(handle, self._handles) and handle.device == self._device:
            return handle
        if not isinstance(handle, tuple | list) or not all(isinstance(one, torch.Tensor) for one in handle):
            return None
        return self._handles.again(handle, self._device)

    def _check_rows(self, name: str, x: object) -> torch.Tensor:
        """``x`` as a contiguous matrix on the device whose rows are multiples of 16 bytes."""
        if not isinstance(x, torch.Tensor):
            raise ConfigError(f"{name} must be a tensor, not {type(x).__name__}")
        if x.device != self._device:
            check_device(self._device, **{name: x})
        if x.dim() != 2 or x.shape[1] == 0:
            raise ConfigError(f"{name} must be [tokens, hidden] with hidden > 0, not {in_words(x)}")
        if not x.is_contiguous():
            raise ConfigError(f"{name} {in_words(x)} must be contiguous, its strides are {x.stride()}")
        if x.shape[1] * x.element_size() % UNIT:
            raise ConfigError(
                f"{name} {in_words(x)}: a row of {x.shape[1] * x.element_size()} bytes is no multiple of {UNIT} bytes"
            )
        if self._aligned:
            check_start(name, x, self._device)
        else:
            check_memory(name, x)
        return x

    def _rows_and_scales(self, x: object) -> tuple[torch.Tensor, torch.Tensor | None, int]:
        """Take apart dispatch's ``x``: rows, contiguous scales or None, DTYPE_*."""
        if not isinstance(x, tuple):
            rows = self._check_rows("x", x)
            if rows.dtype in _FLOAT8:
                raise ConfigError(f"x {in_words(rows)} needs its scales: pass the pair (x, scales)")
            if rows.dtype not in VALUE_CODES:
                raise ConfigError(f"x {in_words(rows)}: not bfloat16, float16, float32, or float8_e4m3 with scales")
            return rows, None, VALUE_CODES[rows.dtype]
        if len(x) != 2 or not isinstance(x[1], torch.Tensor):
            raise ConfigError("x must be a tensor or a pair (float8 rows, scales)")
        rows, scales = self._check_rows("x[0]", x[0]), x[1]
        if rows.dtype not in _FLOAT8:
            raise ConfigError(f"x[0] {in_words(rows)} beside scales must be float8_e4m3")
        check_device(self._device, scales=scales)
        tokens, hidden = rows.shape
        if hidden % SCALE_BLOCK:
            raise ConfigError(f"hidden = {hidden}: block-scaled FP8 needs a multiple of {SCALE_BLOCK}")
        expected = {torch.float32: hidden // SCALE_BLOCK, torch.int32: -(-hidden // _PACKED_BLOCK)}
        if scales.dtype not in expected or scales.shape != (tokens, expected[scales.dtype]):
            raise ConfigError(
                f"scales must be float32[{tokens}, {expected[torch.float32]}] or packed int32[{tokens}, "
                f"{expected[torch.int32]}], not {in_words(scales)}"
            )
        return rows, scales.contiguous(), DTYPE_FP8 if scales.dtype == torch.float32 else DTYPE_FP8_UE8M0

    def _check_layout(
        self, layout: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None], tokens: int
    ) -> Layout:
        """num_tokens_per_rank, is_token_in_rank and num_tokens_per_expert, contiguous."""
        per_rank, in_rank, per_expert = layout
        if per_rank is None or in_rank is None or per_expert is None:
            raise ConfigError(
                "dispatch without a handle needs num_tokens_per_rank, is_token_in_rank and num_tokens_per_expert: call "
                "get_dispatch_layout first"
            )
        ranks, experts = self._ranks, per_expert
        check_device(
            self._device, num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=experts
        )
        if per_rank.dtype != torch.int32 or per_rank.shape != (ranks,):
            raise ConfigError(f"num_tokens_per_rank must be int32[{ranks}], not {in_words(per_rank)}")
        if in_rank.dtype != torch.bool or in_rank.shape != (tokens, ranks):
            raise ConfigError(f"is_token_in_rank must be bool[{tokens}, {ranks}], not {in_words(in_rank)}")
        if experts.dtype != torch.int32 or experts.dim() != 1 or not experts.numel() or experts.numel() % ranks:
            raise ConfigError(
                f"num_tokens_per_expert must be int32[experts], experts a multiple of {ranks}, not {in_words(experts)}"
            )
        return Layout(per_rank.contiguous(), in_rank.contiguous(), experts.contiguous())

    def _biases(
        self, bias: torch.Tensor | tuple[torch.Tensor | None, torch.Tensor | None] | None, tokens: int, x: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """No, one or two biases, contiguous."""
        if bias is None:
            return ()
        if isinstance(bias, tuple) and len(bias) > 2:
            raise ConfigError(f"bias must be one tensor or two, not {len(bias)}")
        biases = [one for one in (bias if isinstance(bias, tuple) else (bias,)) if one is not None]
        for one in biases:
            check_device(self._device, bias=one)
            if one.dtype != x.dtype or one.shape != (tokens, x.shape[1]):
                raise ConfigError(f"bias must be {x.dtype}[{tokens}, {x.shape[1]}], not {in_words(one)}")
        found = tuple(one.contiguous() for one in biases)
        for one in found if self._aligned else ():
            check_start("bias", one, self._device)
        return found


def check_ids(topk_idx: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Contiguous expert ids. Their range is checked when they are counted. Raises ConfigError."""
    if topk_idx is None:
        raise ConfigError("topk_idx must be int64 [tokens, topk], not NoneType")
    check_device(device, topk_idx=topk_idx)
    return _contiguous_ids(topk_idx)


def _contiguous_ids(topk_idx: torch.Tensor) -> torch.Tensor:
    if topk_idx.dtype != torch.int64 or topk_idx.dim() != 2 or topk_idx.shape[1] == 0:
        raise ConfigError(f"topk_idx must be int64 [tokens, topk], not {in_words(topk_idx)}")
    return topk_idx.contiguous()


def _check_topk(
    topk_idx: torch.Tensor | None, topk_weights: torch.Tensor | None, tokens: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Contiguous ids and weights of ``tokens`` tokens."""
    if topk_idx is None or topk_weights is None:
        raise ConfigError("topk_idx and topk_weights go together: give both or none")
    check_device(device, topk_idx=topk_idx, topk_weights=topk_weights)
    ids = _contiguous_ids(topk_idx)
    if ids.shape[0] != tokens:
        raise ConfigError(f"topk_idx {in_words(ids)} does not belong to the {tokens} tokens of x")
    if topk_weights.dtype != torch.float32 or topk_weights.shape != ids.shape:
        raise ConfigError(f"topk_weights must be float32{list(ids.shape)}, not {in_words(topk_weights)}")
    return ids, topk_weights.contiguous()


def check_experts(num_experts: object, ranks: int) -> int:
    """``num_experts`` as a plain integer, a positive multiple of the ranks. Raises ConfigError."""
    experts = check_integer("num_experts", num_experts)
    if experts < 1 or experts % ranks:
        raise ConfigError(f"num_experts = {experts} must be a positive multiple of the {ranks} ranks")
    return experts


def _check_alignment(expert_alignment: int, num_worst_tokens: int) -> None:
    check_integer("expert_alignment", expert_alignment)
    check_integer("num_worst_tokens", num_worst_tokens)
    if expert_alignment < 1:
        raise ConfigError(f"expert_alignment = {expert_alignment} must be at least 1")
    if num_worst_tokens < 0:
        raise ConfigError(f"num_worst_tokens = {num_worst_tokens} must not be negative")
