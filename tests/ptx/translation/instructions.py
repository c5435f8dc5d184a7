"""Single instructions of PTX, executed on arrays: a thread a value."""

from __future__ import annotations

import os
import re
import subprocess
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tests.ptx.translation.event import CTAX, PARAMS, PC, RANGES, TID
from tests.ptx.translation.host_code import Kernel
from tests.ptx.translation.program import WIDTHS

__all__ = ["Instructions", "assemble", "kernel_text", "run_threads"]

Array = NDArray[np.generic]
_PTXAS = Path(sysconfig.get_paths()["purelib"]) / "triton/backends/nvidia/bin/ptxas"


def kernel_text(body: str, parameters: str = ".param .u64 out", before: str = "", threads: int = 32) -> str:
    """A module with the kernel ``tried``."""
    return f"""
.version 8.6
.target sm_100
.address_size 64
{before}
.visible .entry tried({parameters})
.reqntid {threads}
{{
{body}
}}
"""


def assemble(text: str) -> str:
    """What ptxas has against ``text``; nothing where it is real PTX."""
    target = re.search(r"\.target (\w+)", text)
    assert target
    command = [str(_PTXAS), f"--gpu-name={target[1]}", "-O0", "-o", os.devnull, "/dev/stdin"]
    found = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=False)
    return found.stdout + found.stderr if found.returncode else ""


def run_threads(
    kernel: Kernel, threads: int, parameters: Sequence[int], block: int | None = None
) -> tuple[Array, Array]:
    """Every thread once, until its next event: states [threads, slots] and events [threads]. Registers begin as
    garbage; any address counts as mapped.

    Args:
        block: threads of each; None: there is one of all.
    """
    states = np.random.default_rng(1).integers(0, 1 << 64, (threads, kernel.nslots), dtype=np.uint64)
    given = np.array(parameters, np.uint64)
    states[:, [PC, RANGES]] = 0
    states[:, CTAX], states[:, TID] = divmod(np.arange(threads), block or threads)
    states[:, PARAMS] = given.ctypes.data
    events, lanes = np.full(threads, 77, np.int32), np.arange(threads, dtype=np.int32)
    kernel.drive(states.ctypes.data, lanes.ctypes.data, threads, events.ctypes.data)
    return states, events


class Instructions:
    """Instructions with the same inputs.

    Args:
        texts: with D for the result, A, B and C for the inputs; E for a second result.
        inputs: types of A, B and C.
        result: type of D and E.
    """

    def __init__(self, texts: Sequence[str], inputs: Sequence[str], result: str) -> None:
        self.texts, self.inputs, self.result = tuple(texts), tuple(inputs), result
        lines = [".reg .b64 %at, %by;", ".reg .b32 %i, %told;", "mov.u32 %i, %tid.x;"]
        for number, kind in enumerate(inputs):
            lines += self._loaded(number, kind)
        for number, text in enumerate(self.texts):
            lines += self._executed(number, text)
        parameters = ", ".join(f".param .u64 p{number}" for number in range(len(inputs) + len(self.texts)))
        self.text = kernel_text("\n".join([*lines, "ret;"]), parameters)
        self._kernel: Kernel | None = None

    @staticmethod
    def _register(kind: str) -> str:
        return "pred" if kind == "pred" else f"b{max(WIDTHS[kind], 16)}"

    def _loaded(self, number: int, kind: str) -> list[str]:
        name, bits = f"%{'abc'[number]}", WIDTHS[kind]
        into = name if kind != "pred" else "%told"
        return [
            f".reg .{self._register(kind)} {name};",
            *self._element(number, bits),
            f"ld.global.{'b8' if kind == 'pred' else f'b{bits}'} {into}, [%at];",
            *(["setp.ne.b32 %a, %told, 0;".replace("%a", name)] if kind == "pred" else []),
        ]

    @staticmethod
    def _element(number: int, bits: int) -> list[str]:
        return [f"ld.param.u64 %at, [p{number}];", f"mul.wide.u32 %by, %i, {bits // 8};", "add.s64 %at, %at, %by;"]

    def _executed(self, number: int, text: str) -> list[str]:
        kind, bits = self.result, WIDTHS[self.result]
        names = {"A": "%a", "B": "%b", "C": "%c", "D": f"%d{number}", "E": f"%e{number}"}
        lines = [f".reg .{self._register(kind)} %d{number}, %e{number};"]
        lines.append(re.sub(r"\b[A-E]\b", lambda found: names[found[0]], text) + ";")
        lines += self._element(len(self.inputs) + number, bits)
        if kind == "pred":
            lines.append(f"selp.b32 %told, 1, 0, %d{number};")
        return [*lines, f"st.global.b{bits} [%at], {'%told' if kind == 'pred' else f'%d{number}'};"]

    def run(self, *inputs: Array) -> list[Array]:
        """By instruction its results, as unsigned integers, of inputs given by their bits."""
        self._kernel = self._kernel or Kernel(self.text, weak=False)
        given = [
            np.ascontiguousarray(one, f"u{WIDTHS[kind] // 8}") for one, kind in zip(inputs, self.inputs, strict=True)
        ]
        count = len(given[0])
        results = [np.zeros(count, f"u{WIDTHS[self.result] // 8}") for _ in self.texts]
        _, events = run_threads(self._kernel, count, [one.ctypes.data for one in (*given, *results)])
        assert not events.any()
        return results
