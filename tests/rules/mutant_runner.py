"""Runs the tests of a table of mutants on the copy of the package that stands first on ``sys.path``.

mutant_runner RESULT MODULE TABLE RULE...    for example tests.rules.kernel_mutants MUTANTS "a full ring takes nothing"

Writes JSON: {"": exit status of all tests with all rules in force, rule: exit status of its test without it}.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import sys
from pathlib import Path

import pytest

from tests.rules.mutant_copy import SWITCH
from tests.rules.mutation import ROOT


def run(tests: list[str]) -> int:
    """Exit status of pytest: 0 = passed, 1 = a test failed."""
    # Failures are expected: their tracebacks would only fill the log.
    options = ["-q", "-x", "--tb=line", "-p", "no:cacheprovider", f"--rootdir={ROOT}", f"-c={ROOT / 'pyproject.toml'}"]
    return int(pytest.main([*options, *(str(ROOT / test) for test in tests)]))


def main() -> None:
    import uccl_ep_serving

    assert ROOT not in Path(str(uccl_ep_serving.__file__)).parents, "the package itself runs, not its copy"
    table = getattr(importlib.import_module(sys.argv[2]), sys.argv[3])
    # in the order of the copy, which numbers them
    mutants = {rule: table[rule] for rule in sys.argv[4:]}
    switch = ctypes.c_int64.from_address(SWITCH)
    results = {"": run(sorted({mutant.test for mutant in mutants.values()}))}
    for number, (name, mutant) in enumerate(mutants.items(), start=1):
        switch.value = number
        results[name] = run([mutant.test])
        switch.value = 0
        Path(sys.argv[1]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
