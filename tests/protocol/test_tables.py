"""ARCHITECTURE.md says what the code says."""

from __future__ import annotations

from pathlib import Path

import pytest

from uccl_ep_serving.protocol import context, tables


def test_the_page_is_up_to_date() -> None:
    assert tables.main(["--check"]) == 0, "run python -m uccl_ep_serving.protocol.tables --write"


def test_check_notices_and_write_repairs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    current = tables.render(tables.PAGE.read_text())
    page.write_text(current.replace("| 37-48 | rank |", "| 37-47 | rank |"))
    assert tables.main(["--check", "--page", str(page)]) == 1
    assert "out of date" in capsys.readouterr().out
    assert tables.main(["--write", "--page", str(page)]) == 0
    assert page.read_text() == current


def test_a_missing_marker_is_named() -> None:
    with pytest.raises(ValueError, match="no markers for the table 'command'"):
        tables.render("prose only")


@pytest.mark.parametrize("name", tables.TABLES)
def test_every_table_has_rows_of_equal_width(name: str) -> None:
    lines = tables.TABLES[name]().splitlines()
    assert len(lines) > 2
    assert len({line.replace("\\|", "").count("|") for line in lines}) == 1


def test_the_context_table_names_every_word() -> None:
    names = [line.split("|")[2].strip() for line in tables.TABLES["context"]().splitlines()[2:]]
    others = ("ERROR_", "FAILURE_", "STATUS_", "CONTEXT_")
    words = {name: value for name, value in vars(context).items() if name.isupper() and not name.startswith(others)}
    assert {name: i for i, name in enumerate(names)} == words


def test_every_header_word_has_a_meaning() -> None:
    for line in tables.TABLES["headers"]().splitlines()[2:]:
        *_, meaning, _ = line.replace("\\|", "").split("|")
        assert meaning.strip(), f"no meaning: {line}"
