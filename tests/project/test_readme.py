"""The ten lines in README.md do what the README says, and its line of installation names the wheel of this version."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.support import ten_lines
from tests.support.bounded import run_bounded
from tests.support.source_tree import PYPROJECT, ROOT


def test_ten_lines_double_every_token_on_two_ranks(tmp_path: Path) -> None:
    ran = run_bounded(ten_lines.command(sys.executable, tmp_path), seconds=100, cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout[-4000:]
    assert ten_lines.is_checked(ran.stdout), ran.stdout[-4000:]


@pytest.mark.parametrize("output", ["", "checked 0\n", "checked 0\nchecked 0\n", "checked 0\nchecked 1\nchecked 2\n"])
def test_a_rank_that_has_not_checked_its_tokens_is_noticed(output: str) -> None:
    assert not ten_lines.is_checked(output)
    assert ten_lines.is_checked("checked 1\nanything\nchecked 0\n")


def test_the_line_of_installation_names_the_wheel() -> None:
    project = PYPROJECT["project"]
    named = re.findall(r"[\w.]+-[\w.]+-py3-none-any\.whl", (ROOT / "README.md").read_text())
    assert named
    assert set(named) == {f"{project['name']}-{project['version']}-py3-none-any.whl"}
