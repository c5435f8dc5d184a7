"""A copy of the package in which rules can be taken out, each by a switch of its own.

:func:`write_copy` copies the package into a directory and puts a switch, all at one fixed address, around every rule of
a table, so that the copy is compiled once for all of them. :mod:`mutant_runner`, in a process of its own that imports
the copy, throws one switch after the other and runs the test that must notice.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rules.mutation import ROOT, SOURCE, Mutant, Rules, find, mutated

#: Where the copy maps its switch: an address that no allocator hands out, the same in every process.
SWITCH = 0x5A00_0000_0000

#: Put into the copy's ``__init__.py``: map one page at SWITCH before anything is compiled or interpreted, the same in
#: every process that imports the copy.
_MAP = f"""
import ctypes as _ctypes
import os as _os
import pathlib as _pathlib
_switch = _os.open(_pathlib.Path(__file__).with_name("switch"), _os.O_RDWR)
_libc = _ctypes.CDLL(None)
_libc.mmap.restype = _ctypes.c_void_p
_libc.mmap.argtypes = [_ctypes.c_void_p, _ctypes.c_size_t] + [_ctypes.c_int] * 3 + [_ctypes.c_long]
# PROT_READ | PROT_WRITE; MAP_SHARED | MAP_FIXED_NOREPLACE
assert _libc.mmap({SWITCH}, 4096, 3, 0x100001, _switch, 0) == {SWITCH}
_os.close(_switch)
"""


def write_copy(directory: Path, mutants: Rules[Mutant]) -> None:
    """Copy the package into ``directory``, every rule of ``mutants`` with a switch.

    Raises AssertionError when a rule is not marked exactly once.
    """
    ignored = shutil.ignore_patterns("__pycache__")
    for part in SOURCE:
        shutil.copytree(ROOT / part, directory / part, symlinks=True, ignore=ignored)
    package = directory / "uccl_ep_serving/__init__.py"
    package.write_text(package.read_text() + _MAP)
    package.with_name("switch").write_bytes(bytes(4096))
    ways = {rule: mutant.way for rule, mutant in mutants.items()}
    for path, source in mutated(ways, find(mutants), SWITCH).items():
        (directory / path).write_text(source)


def run_without_rules(request: pytest.FixtureRequest, module: str, table: str) -> dict[str, int]:
    """Exit status of each rule's test without the rule, of the rules that tests of this session name; the copy is
    compiled once, into a cache of its own.

    Args:
        module, table: where the rules are, and the process finds them.
    """
    directory: Path = request.getfixturevalue("tmp_path_factory").mktemp("mutants")
    named = {item.callspec.params.get("rule") for item in request.session.items if hasattr(item, "callspec")}
    everything: Rules[Mutant] = getattr(importlib.import_module(module), table)
    mutants = Rules(everything.places, {rule: one for rule, one in everything.items() if rule in named})
    write_copy(directory, mutants)
    result = directory / "results.json"
    environment = {
        **os.environ,
        "PYTHONPATH": str(directory),
        "UCCL_EP_CACHE_DIR": str(directory / "cache"),
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.rules.mutant_runner", str(result), module, table, *mutants],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert result.exists(), done.stdout[-4000:] + done.stderr[-4000:]
    found: dict[str, int] = json.loads(result.read_text())
    assert found[""] == 0, f"a test fails with all rules in force: {done.stdout[-4000:]}"
    return found
