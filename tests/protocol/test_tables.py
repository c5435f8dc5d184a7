"""The tables of docs/architecture/formats.md have a row for everything that they describe."""

from __future__ import annotations

import pytest

from uccl_ep_serving.protocol import context, tables


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
