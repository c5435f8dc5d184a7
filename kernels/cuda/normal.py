"""Normal mode whose rows the tensor memory accelerator moves, where all peers are mapped: launches of CuPy's.

Triton's kernels count ids and open operations; here are those that move rows, of the same state and pipes. So ranks of
a group may differ in which of the two moves theirs.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import ConfigError, TransportError
from ..blocks.normal_device import NormalFormat, NormalOpening, NormalTensors
from ..triton.launch import Launch
from ..triton.normal import TritonNormalKernels
from ..triton.target import Target
from . import blocks, nvrtc

__all__ = ["CopyCode", "CopyLaunch", "CopyNormalKernels", "check_copies"]

#: Warps of a block. Each has slots of its own in shared memory, of which a block of sm_90 and sm_100 can have so many
#: bytes; what stands there beside them takes so many for each rank, and 1 KiB.
_WARPS, _SHARED, _OF_A_RANK = 8, 227 << 10, 104
#: Most slots of a warp, and bytes of one. Values that are summed are held in registers meanwhile: 64 of each thread.
_SLOTS, _PIECE, _SUMMED = 6, 8192, 4096
_HERE = Path(__file__).parent
#: Least compute capability that has bulk copies.
_LEAST = 90
_OTHERWISE = "Next step: UCCL_EP_COPY=triton, which any rank may set for itself"


@functools.cache
def _headers() -> dict[str, str]:
    return {**nvrtc.headers(), "blocks.cuh": blocks.header()}


class CopyCode(NamedTuple):
    """A kernel and all that it is compiled for.

    Attributes:
        name: of its file and, with what profiles of an engine know us by before it, of the kernel.
        constants: (macro, value) pairs.
    """

    name: str
    constants: tuple[tuple[str, int], ...]

    @property
    def threads(self) -> int:
        """Of a block."""
        return 32 * dict(self.constants)["WARPS"]

    @property
    def shared(self) -> int:
        """Bytes of a block that are asked for at its launch."""
        of = dict(self.constants)
        return of["WARPS"] * of["SLOTS"] * of["PIECE"]

    def compiled(self, gpu: str) -> nvrtc.Binary:
        """For ``gpu``, which need not be there."""
        text = (_HERE / f"{self.name}.cu").read_text()
        return nvrtc.compiled(text, f"{self.name}.cu", gpu, dict(self.constants), _headers())

    @property
    def function(self) -> str:
        """Name of the kernel."""
        return f"uccl_ep_{self.name}"


@functools.cache
def _loaded(code: CopyCode, device: int) -> Any:
    """The kernel in a device, as CuPy has it."""
    cupy = _cupy()
    with cupy.cuda.Device(device):
        binary = code.compiled(f"sm_{cupy.cuda.Device(device).compute_capability}")
        try:
            # CuPy takes a file
            with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
                file.write(binary.cubin)
                file.flush()
                function = cupy.RawModule(path=file.name).get_function(code.function)
            function.max_dynamic_shared_size_bytes = code.shared
        except Exception as error:
            raise TransportError(
                f"{code.function} is compiled, and the GPU does not load it: {error}. Likely cause: its memory is "
                "taken, or a kernel of this process has failed before. Next step: UCCL_EP_COPY=triton"
            ) from error
        return function


def check_copies(ranks: int) -> None:
    """Raise ConfigError where a group of so many ranks cannot have these kernels on the current device."""
    import torch

    cupy = _cupy()
    nvrtc.version()
    if not torch.cuda.is_available() or torch.version.hip:
        raise ConfigError(f"UCCL_EP_COPY=tma needs a GPU of sm_90 or newer: there is none. {_OTHERWISE}")
    device = cupy.cuda.Device(torch.cuda.current_device())
    room = device.attributes["MaxSharedMemoryPerBlockOptin"]
    if int(device.compute_capability) < _LEAST or room < _SHARED:
        raise ConfigError(
            f"UCCL_EP_COPY=tma needs sm_90 or sm_100: this is sm_{device.compute_capability}, a block of which "
            f"has {room >> 10} KiB of shared memory. {_OTHERWISE}"
        )
    if ranks > 32 * _WARPS:
        raise ConfigError(f"UCCL_EP_COPY=tma serves up to {32 * _WARPS} ranks, not {ranks}. {_OTHERWISE}")


def _cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise ConfigError(
            f"UCCL_EP_COPY=tma needs CuPy: {error}. Next step: pip install cupy-cuda13x (cupy-cuda12x for CUDA 12), or "
            "UCCL_EP_COPY=triton, which any rank may set for itself"
        ) from error
    return cupy


class _Stream(NamedTuple):
    """Torch's stream, as CuPy 14 takes those of others."""

    handle: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


@functools.lru_cache(maxsize=64)
def _stream(device: int, handle: int) -> Any:
    """What CuPy launches on inside ``with``."""
    cuda = _cupy().cuda
    with cuda.Device(device):
        if hasattr(cuda.Stream, "from_external"):
            return cuda.Stream.from_external(_Stream(handle))
        return cuda.ExternalStream(handle, device)


class CopyLaunch(NamedTuple):
    """A kernel with its arguments.

    Attributes:
        code: of the kernel.
        grid: blocks.
        arguments: words, in the order of the kernel's parameters.
    """

    code: CopyCode
    grid: tuple[int, int, int]
    arguments: tuple[int, ...]

    def run(self) -> None:
        """Launch on the current stream."""
        import numpy as np
        import torch

        stream = torch.cuda.current_stream()
        function = _loaded(self.code, stream.device_index)
        arguments = tuple(map(np.uint64, self.arguments))
        with _stream(stream.device_index, stream.cuda_stream):
            function(self.grid, (self.code.threads,), arguments, shared_mem=self.code.shared)

    def compile(self) -> None:
        """Compile, and load into the current device: a launch does it otherwise, which no graph can capture.

        Raises:
            TransportError: the device does not take it.
        """
        import torch

        _loaded(self.code, torch.cuda.current_device())


class CopyNormalKernels(TritonNormalKernels):
    """Those of Triton, but for what moves rows between ranks that map each other's windows.

    Args: as of :class:`TritonNormalKernels`.
    """

    name = "tma"

    def __init__(self, ranks: int, target: Target | None = None) -> None:
        super().__init__(ranks, target)
        self._of_copies = functools.cache(self._make_copies)

    def _make_copies(self, name: str, row_bytes: int, most: int, *constants: tuple[str, int]) -> CopyCode:
        pieces = -(-row_bytes // most)
        piece = -(-row_bytes // pieces // 16) * 16
        slots = min(_SLOTS, (_SHARED - 1024 - _OF_A_RANK * self.ranks) // (_WARPS * piece))
        shape = (("ROW", row_bytes), ("PIECE", piece), ("SLOTS", slots), ("WARPS", _WARPS), ("RANKS", self.ranks))
        return CopyCode(name, (*shape, *constants))

    def dispatch(  # type: ignore[override]
        self,
        context: int,
        state: int,
        form: NormalFormat,
        opening: NormalOpening,
        tensors: NormalTensors,
        capacity: int,
        marks: int,
        kept: int,
        is_open: bool,
    ) -> tuple[Launch | CopyLaunch, ...]:
        """See :meth:`TritonNormalKernels.dispatch`; another launch opens, before."""
        if form.node_ranks:
            return super().dispatch(context, state, form, opening, tensors, capacity, marks, kept, is_open)
        scales = ("SCALE_WORDS", form.scale_bytes // 4)
        code = self._of_copies("copy_dispatch", form.row_bytes, _PIECE, ("TOPK", form.topk), scales)
        arguments = (
            context,
            state,
            form.channels,
            form.meta_bytes,
            form.local_experts,
            capacity,
            opening.in_rank,
            opening.tokens,
            tensors.x,
            tensors.topk_idx,
            tensors.weights,
            tensors.scales,
            tensors.out,
            tensors.out_idx,
            tensors.out_weights,
            tensors.out_scales,
        )
        moving = CopyLaunch(code, (form.channels, 1, 1), arguments)
        return (moving,) if is_open else (*self.open(context, state, form, opening, capacity), moving)

    def combine(  # type: ignore[override]
        self,
        context: int,
        state: int,
        form: NormalFormat,
        opening: NormalOpening,
        tensors: NormalTensors,
        received: int,
        marks: int,
        kept: int,
        biases: tuple[int, ...],
    ) -> tuple[Launch | CopyLaunch, ...]:
        """See :meth:`TritonNormalKernels.combine`; another launch opens, before."""
        if form.node_ranks:
            return super().combine(context, state, form, opening, tensors, received, marks, kept, biases)
        constants = (("TOPK", form.topk), ("DTYPE", form.dtype), ("BIASES", len(biases)))
        code = self._of_copies("copy_combine", form.row_bytes, _SUMMED, *constants)
        bias_0, bias_1 = (*biases, 0, 0)[:2]
        arguments = (
            context,
            state,
            form.channels,
            form.meta_bytes,
            opening.in_rank,
            opening.tokens,
            tensors.x,
            received,
            tensors.weights,
            bias_0,
            bias_1,
            tensors.out,
            tensors.out_weights,
        )
        moving = CopyLaunch(code, (form.channels, 1, 1), arguments)
        return *self.open(context, state, form, opening, 0), moving
