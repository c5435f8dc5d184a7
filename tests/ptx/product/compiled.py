"""What Triton makes of the product's launches, translated for the model machine: each kernel once for all machines."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import NamedTuple

from tests.ptx.translation.host_code import Kernel
from uccl_ep_serving.kernels.cuda.normal import CopyLaunch
from uccl_ep_serving.kernels.triton.ahead import GPUS, compiling_for
from uccl_ep_serving.kernels.triton.launch import Launch

#: Changes the PTX of a kernel, told its name there.
Edit = Callable[[str, str], str]


class Ready(NamedTuple):
    """One launch, as the driver would get it.

    Attributes:
        kernel: translated.
        arguments: of the launch, without those that Triton compiled in.
        shared: bytes of a program.
    """

    kernel: Kernel
    arguments: list[int]
    shared: int


class Compiled:
    """Kernels by their text.

    Args:
        weak: they stop at every access of global memory; else at the ordered ones only.
        gpu: what Triton compiles for, of :data:`GPUS`.
    """

    def __init__(self, weak: bool, gpu: str = "sm_90") -> None:
        self._weak, self._name, self._gpu = weak, gpu, GPUS[gpu]
        self._edit: Edit = lambda name, text: text
        self._kernels: dict[str, Kernel] = {}
        #: of an edit, gone with it
        self._edited: dict[str, Kernel] = {}

    def edited(self, edit: Edit) -> Compiled:
        """The same with other kernels where ``edit`` changes them."""
        other = copy.copy(self)
        other._edit, other._edited = edit, {}
        return other

    def ready(self, launch: Launch | CopyLaunch) -> Ready:
        """The way of a launch through Triton, specialized for its arguments, or through NVRTC, up to the driver."""
        if isinstance(launch, CopyLaunch):
            text = self._edit(launch.code.function, launch.code.compiled(self._name).ptx)
            if text not in self._kernels:
                self._kernels[text] = Kernel(text, self._weak)
            return Ready(self._kernels[text], list(launch.arguments), launch.code.shared)
        with compiling_for(self._gpu):
            built = launch.build()
        given = built.asm["ptx"]
        text = self._edit(built.metadata.name, given)
        kept = self._kernels if text == given else self._edited
        if text not in kept:
            kept[text] = Kernel(text, self._weak)
        passed = [built.src.signature[name] != "constexpr" for name in launch.kernel.arg_names[: len(launch.arguments)]]
        arguments = [value for value, kept in zip(launch.arguments, passed, strict=True) if kept]
        return Ready(kept[text], arguments, built.metadata.shared)
