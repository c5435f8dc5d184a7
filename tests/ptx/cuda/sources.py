"""Sources in CUDA C, compiled and translated for the model machine: each text once in a process."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from tests.ptx.translation.host_code import Kernel
from uccl_ep_serving.kernels.cuda import nvrtc

HERE = Path(__file__).parent
#: Changes a text, told the name of its file.
Edit = Callable[[str, str], str]


def unchanged(name: str, text: str) -> str:
    """The :data:`Edit` that is none."""
    return text


@lru_cache
def _kernel(name: str, text: str, headers: tuple[tuple[str, str], ...], gpu: str, weak: bool, stages: int) -> Kernel:
    constants = {"THREADS": 64, "STAGES": stages}
    return Kernel(nvrtc.compiled(text, f"{name}.cu", gpu, constants, dict(headers)).ptx, weak)


def kernel(name: str, gpu: str, weak: bool, stages: int, edit: Edit = unchanged) -> Kernel:
    """That of ``name``.cu, with the headers as ``edit`` leaves them."""
    headers = tuple((path, edit(path, text)) for path, text in nvrtc.headers().items())
    text = edit(f"{name}.cu", (HERE / f"{name}.cu").read_text())
    return _kernel(name, text, headers, gpu, weak, stages)
