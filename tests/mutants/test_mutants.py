"""``make mutants``: what is drawn, which tests concern it, and that a killed, a surviving and a hanging one are told
apart, in a tree of two files."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.mutants import __main__ as command
from tests.mutants.concern import Imports
from tests.mutants.draw import Mutant, applied, drawn, mutants
from tests.mutants.score import QUICK, SLOW, Record, area_of, is_for_devices, sums
from tests.mutants.trial import KILLED, SURVIVED, TIMEOUT, Limits, Outcome, Tree

CALC = '''"""Says 1 > 0 and not more."""

import logging

__all__ = ["count", "larger"]
_log = logging.getLogger("calc")


def larger(a: "int | None", b: int = 2, *, strict: bool = True) -> bool:
    """Not when 1 == 1."""
    _log.info("%d", 1 + 1)
    if not strict and a is not None:
        return max(a, b) == a
    return a - b > 0


def count(steps: int) -> int:
    done = 0
    while steps > 0:
        steps -= 1
        done += 1
    if done < 0:
        raise ValueError(f"{done + 1} is too few" + str(1))
    return pow(done, 1)
'''
TESTS = """
import calc

def test_larger():
    assert calc.larger(3, 2)
    assert not calc.larger(1, 2)

def test_count():
    assert calc.count(3) == 3
"""
LIMITS = Limits(tests=20, one=1, rest=5, queue=20)


def edits(source: str) -> dict[str, set[str]]:
    """By kind of mutant, the lines that it makes."""
    found: dict[str, set[str]] = {}
    for mutant in mutants("calc.py", source):
        found.setdefault(mutant.kind, set()).add(mutant.after)
    return found


def test_every_kind_of_mutant() -> None:
    made = edits(CALC)
    assert made["comparison"] == {
        "if not strict and a is None:",
        "return max(a, b) != a",
        "return a - b >= 0",
        "while steps >= 0:",
        "if done <= 0:",
    }
    assert made["operator"] == {"return a + b > 0"}
    assert made["and / or"] == {"if not strict or a is not None:"}
    assert made["not dropped"] == {"if strict and a is not None:"}
    assert made["min / max"] == {"return min(a, b) == a"}
    assert made["arguments swapped"] == {"return pow(1, done)"}
    assert made["statement dropped"] == {"pass"}
    assert made["condition negated"] == {
        "if not (not strict and a is not None):",
        "while not (steps > 0):",
        "if not (done < 0):",
    }
    signature = 'def larger(a: "int | None", b: int = {}, *, strict: bool = {}) -> bool:'
    assert made["True / False"] == {signature.format(2, False)}
    assert made["constant"] > {signature.format(3, True), signature.format(1, True), "done = 1", "done = -1"}


def test_what_nobody_tests_is_left_alone() -> None:
    """Docstrings, ``__all__``, annotations, log calls and messages."""
    changed = {mutant.before for mutant in mutants("calc.py", CALC)}
    assert not [line for line in changed if '"""' in line or "__all__" in line or "_log.info" in line]
    # of a raise only the whole
    raised = [mutant for mutant in mutants("calc.py", CALC) if mutant.before.startswith("raise")]
    assert [mutant.after for mutant in raised] == ["pass"]


def test_a_seed_fixes_the_order_whatever_is_added_elsewhere() -> None:
    def ids(seed: int, source: str) -> list[str]:
        return [mutant.id for mutant in drawn(seed, {"calc.py": source})]

    first = ids(1, CALC)
    assert len(first) == len({mutant.line for mutant in mutants("calc.py", CALC)})
    assert first == ids(1, CALC) != ids(2, CALC)
    longer = ids(1, CALC.replace("def count", "LEAST = 7\n\n\ndef count"))
    assert [one for one in longer if one in first] == first


def test_a_mutant_is_one_line_and_one_that_moved_is_refused() -> None:
    for mutant in drawn(3, {"calc.py": CALC}):
        before, after = CALC.split("\n"), applied(CALC, mutant).split("\n")
        changed = [(was.strip(), now.strip()) for was, now in zip(before, after, strict=True) if was != now]
        assert changed == [(mutant.before, mutant.after)]
    with pytest.raises(ValueError, match=r"calc\.py:2 is not"):
        applied(CALC, Mutant("calc.py", 2, 0, "", "what stood there", "x"))


def test_the_tests_that_concern_a_file() -> None:
    sources = {
        "proxy/loop.py": "from .words import A",
        "proxy/words.py": "A = 1",
        "uccl_ep_serving/config.py": "",
        "uccl_ep_serving/buffer.py": "",
        "tests/system/test_life.py": "",
        "uccl_ep_serving/cli/plan.py": "from ..config import x",
        "tests/support/world.py": "from uccl_ep_serving.proxy import loop",
        "tests/proxy/test_words.py": "from tests.support import world",
        "tests/proxy/test_loop.py": "import uccl_ep_serving.proxy.loop",
        "tests/cli/test_plan.py": "RUN = 'python -m uccl_ep_serving.cli.plan --help'",
        "tests/cli/test_warm.py": "START = ['-P', 'warmer.py']",
        "tests/cli/warmer.py": "import uccl_ep_serving.cli.plan",
        "tests/project/test_lint.py": "from uccl_ep_serving import config",
        "tests/test_config.py": "from uccl_ep_serving import config",
    }
    imports = Imports(sources)
    assert imports.tests_of("proxy/words.py") == ["tests/proxy/test_words.py", "tests/proxy/test_loop.py"]
    assert imports.tests_of("proxy/loop.py") == ["tests/proxy/test_loop.py", "tests/proxy/test_words.py"]
    assert imports.tests_of("uccl_ep_serving/config.py") == [
        "tests/test_config.py",
        "tests/cli/test_plan.py",
        "tests/cli/test_warm.py",
    ]
    assert imports.tests_of("uccl_ep_serving/buffer.py") == ["tests/system/test_life.py"]
    assert imports.reached(["uccl_ep_serving.proxy.loop"]) == {
        "uccl_ep_serving.proxy.loop",
        "uccl_ep_serving.proxy.words",
    }


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    (tmp_path / "calc.py").write_text(CALC)
    (tmp_path / "test_calc.py").write_text(TESTS)
    options = (
        "-p",
        "no:cacheprovider",
        "-p",
        "pytest_timeout",
        "--timeout=0.5",
        "-c",
        "/dev/null",
        f"--rootdir={tmp_path}",
    )
    quick = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return Tree(tmp_path, {"calc.py": "calc.py"}, lambda test: sys.executable, options, quick)


@pytest.mark.parametrize(
    ("after", "verdict", "by", "passed"),
    [
        ("return a + b > 0", KILLED, "test_calc.py::test_larger", 0),
        ("steps += 1", TIMEOUT, "test_calc.py::test_count", 1),
        ("if done <= -1:", SURVIVED, "", 2),
    ],
)
def test_what_becomes_of_a_mutant(tree: Tree, after: str, verdict: str, by: str, passed: int) -> None:
    before = {"steps += 1": "steps -= 1", "if done <= -1:": "if done < 0:"}.get(after, "return a - b > 0")
    line = [text.strip() for text in CALC.split("\n")].index(before) + 1
    prepared = []
    found = tree.try_mutant(
        Mutant("calc.py", line, 0, "", before, after),
        ["test_calc.py"],
        LIMITS,
        lambda: prepared.append((tree.root / "calc.py").read_text()),
    )
    assert (found.verdict, found.by, found.tests) == (verdict, by, passed)
    assert after in prepared[0]
    assert (tree.root / "calc.py").read_text() == CALC


def test_what_cannot_be_interrupted_is_ended_and_a_death_is_noticed(tree: Tree) -> None:
    """Compiled code that hangs, or that writes where it must not."""
    line = [text.strip() for text in CALC.split("\n")].index("return pow(done, 1)") + 1
    stuck = "import signal, time; signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65)); time.sleep(60)"
    for after, verdict in ((stuck, TIMEOUT), ("import os; os.kill(os.getpid(), 11)", KILLED)):
        mutant = Mutant("calc.py", line, 0, "", "return pow(done, 1)", after)
        limits = Limits(tests=0.5, one=0.5, rest=2, queue=20)
        found = tree.try_mutant(mutant, ["test_calc.py::test_count"], limits, lambda: None)
        assert (found.verdict, found.by) == (verdict, "test_calc.py::test_count")


def test_a_test_that_fails_anyway_kills_nothing(tree: Tree) -> None:
    (tree.root / "test_calc.py").write_text("def test_wrong():\n    assert False\n" + TESTS)
    line = [text.strip() for text in CALC.split("\n")].index("if done < 0:") + 1
    mutant = Mutant("calc.py", line, 0, "", "if done < 0:", "if done < -1:")
    found = tree.try_mutant(mutant, ["test_calc.py"], LIMITS, lambda: None)
    assert (found.verdict, found.by, found.tests) == (SURVIVED, "", 2)


def test_no_test_is_begun_once_the_seconds_are_over(tree: Tree) -> None:
    line = [text.strip() for text in CALC.split("\n")].index("steps -= 1") + 1
    mutant = Mutant("calc.py", line, 0, "", "steps -= 1", "steps += 1")
    found = tree.try_mutant(mutant, ["test_calc.py"], LIMITS._replace(tests=0.0), lambda: None)
    assert (found.verdict, found.tests) == (SURVIVED, 1)


def test_the_score_is_kept_by_area(tmp_path: Path) -> None:
    record = Record(tmp_path / "mutants.json")
    files = ["proxy/loop.py", "proxy/transport/tcp.py", "kernels/triton/wait.py", "uccl_ep_serving/cli/plan.py"]
    tried = [Mutant(file, 1, 0, "constant", "a = 1", "a = 2") for file in files]
    assert [area_of(file) for file in files] == ["proxy", "transports", "kernels/triton", "tools"]
    for mutant, verdict in zip(tried, (KILLED, TIMEOUT, SURVIVED, SURVIVED), strict=True):
        record.keep(7, mutant, Outcome(verdict, "", 3, 1.5), "abc")
    record.keep(7, tried[3], Outcome(KILLED, "test_plan", 0, 0.5), "abd")
    record.excuse(tried[2].id, "nobody reads it")
    with pytest.raises(ValueError, match="is no survivor"):
        record.excuse(tried[0].id, "it was killed")
    again = Record(tmp_path / "mutants.json")
    assert [one["verdict"] for one in again.mutants] == [KILLED, TIMEOUT, "equivalent", KILLED]
    assert again.of(tried[3]) == json.loads((tmp_path / "mutants.json").read_text())["mutants"][3]
    found = {KILLED: 2, TIMEOUT: 1, SURVIVED: 0, "equivalent": 1, "first": 2, "slow": 0}
    assert sums(again.mutants)["all"] == found
    assert sums(again.mutants)["proxy"][KILLED] == 1


def test_what_only_slow_tests_tell_is_counted_apart(tree: Tree, tmp_path: Path) -> None:
    (tree.root / "test_calc.py").write_text(
        "import calc\nimport pytest\n\n@pytest.mark.slow\ndef test_pow():\n    assert calc.count(3) != 1\n"
    )
    line = [text.strip() for text in CALC.split("\n")].index("return pow(done, 1)") + 1
    mutant = Mutant("kernels/triton/calc.py", line, 0, "", "return pow(done, 1)", "return pow(1, done)")
    inside = mutant._replace(file="calc.py")
    quick = tree.try_mutant(inside, ["test_calc.py"], LIMITS, lambda: None, QUICK)
    slow = tree.try_mutant(inside, ["test_calc.py"], LIMITS, lambda: None, "slow")
    assert [(one.verdict, one.tests) for one in (quick, slow)] == [(SURVIVED, 0), (KILLED, 0)]
    record = Record(tmp_path / "mutants.json")
    record.keep(7, mutant, slow._replace(suite=SLOW), "abc")
    assert sums(record.mutants)["all"] == {KILLED: 1, TIMEOUT: 0, SURVIVED: 0, "equivalent": 0, "first": 0, "slow": 1}


def test_what_slow_tests_are_for() -> None:
    devices = ("kernels/triton/wait.py", "kernels/blocks/normal_device.py", "uccl_ep_serving/modes/normal_gpu_route.py")
    assert all(map(is_for_devices, (*devices, "uccl_ep_serving/gpu/window.py", "uccl_ep_serving/check/operations.py")))
    assert not any(map(is_for_devices, ("kernels/cpu/wait.py", "uccl_ep_serving/modes/normal_cpu.py", "proxy/loop.py")))


def test_what_is_recorded_is_not_tried_again(tmp_path: Path) -> None:
    record = Record(tmp_path / "mutants.json")
    product = {"proxy/calc.py": CALC, "kernels/calc.py": CALC}

    def chosen(*arguments: str) -> list[Mutant]:
        return list(command._chosen(command._options().parse_args(arguments), product, record))

    every = chosen()
    record.keep(command.SEED, every[0], Outcome(SURVIVED, "", 3, 1.0), "abc")
    record.keep(command.SEED, every[1], Outcome(KILLED, "test", 3, 1.0), "abc")
    assert chosen() == every[2:]
    assert chosen("--again") == every[:1]
    assert {mutant.file for mutant in chosen("--area", "proxy")} == {"proxy/calc.py"}
    assert {mutant.file for mutant in chosen("--file", "kernels/calc.py")} == {"kernels/calc.py"}
