"""Compiled code is kept between processes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.ptx.translation import host_code
from tests.ptx.translation.host_code import Kernel
from tests.ptx.translation.instructions import kernel_text, run_threads


def stored(value: int) -> str:
    return kernel_text(f".reg .b64 %t; ld.param.u64 %t, [out]; st.global.b32 [%t], {value};")


def executed(text: str) -> int:
    found = np.zeros(1, np.uint32)
    _, events = run_threads(Kernel(text, weak=False), 1, [found.ctypes.data])
    assert events[0] == 0
    return int(found[0])


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was compiled, with an empty cache."""
    seen: list[str] = []
    real = host_code._compiled
    monkeypatch.setattr(host_code, "places", lambda name: [tmp_path / name])
    monkeypatch.setattr(host_code, "_compiled", lambda ir, machine: (seen.append(ir), real(ir, machine))[1])
    return seen


def test_once(compiled: list[str], tmp_path: Path) -> None:
    assert [executed(stored(value)) for value in (5, 5, 6, 5)] == [5, 5, 6, 5]
    assert len(compiled) == 2
    assert len(list((tmp_path / "ptx").iterdir())) == 2


def test_a_damaged_file_is_compiled_again(compiled: list[str], tmp_path: Path) -> None:
    executed(stored(5))
    (file,) = (tmp_path / "ptx").iterdir()
    content = bytearray(file.read_bytes())
    content[-20] ^= 1
    file.write_bytes(content)
    assert [executed(stored(5)), executed(stored(5))] == [5, 5]
    assert len(compiled) == 2


def test_other_processors_have_their_own(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    executed(stored(5))
    name, features = host_code.processor()
    monkeypatch.setattr(host_code, "processor", lambda: (name, features + ",-avx512f"))
    executed(stored(5))
    assert len(compiled) == 2
