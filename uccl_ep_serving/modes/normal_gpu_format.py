"""What all ranks must agree on in a normal-mode operation on a device, and the words when they do not."""

from __future__ import annotations

import numpy as np

from ..kernels.interface import NormalFormat
from .normal_gpu_reply import OpenReply
from .row_format import RowFormat

__all__ = ["difference", "wire_format"]


def wire_format(form: RowFormat) -> NormalFormat:
    """``form`` for kernels: the number of the dispatch of a handle is known to the device only."""
    epoch, number = form.origin
    step = form._replace(origin=(epoch, number + 1)).digest - form.digest
    return NormalFormat(
        form.kind,
        form.dtype,
        form.row_bytes,
        form.meta_bytes,
        form.scale_bytes,
        form.topk,
        form.local_experts,
        form.digest,
        step & np.iinfo(np.int64).max,
        form.node_ranks,
    )


def difference(rank: int, form: RowFormat, told: OpenReply) -> str:
    """What to say when peers of ``rank`` were given another operation than ``form``; forgets what they told."""
    words = [
        f"rank {peer} operation {coding >> 16} of dtype {coding & 0xFFFF}, {row} bytes a row, {meta} bytes of meta"
        for peer, (shape, coding, row, meta) in enumerate(told.of_ranks())
        if shape
    ]
    told.forget_ranks()
    return (
        f"the ranks were given different operations, nothing was sent: rank {rank} a {form.name} (operation "
        f"{form.kind}) of dtype {form.dtype}, {form.row_bytes} bytes a row, {form.meta_bytes} bytes of meta (hidden "
        f"{form.hidden}, top-k {form.topk}, {form.local_experts} local experts); {'; '.join(words[:8])}. Where these "
        "agree, hidden, top-k, the experts or the handle differ"
    )
