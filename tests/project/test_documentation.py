"""Links lead somewhere, commands exist, generated tables are current, paths and variables that are named are there."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import typer

from tests.support.source_tree import ROOT, load_script, python_sources, source_files
from uccl_ep_serving.cli import main as cli

#: Lines that the README may have.
_README_LINES = 120
#: Hops that a token may take.
_HOPS = 25
#: Arguments that a function may have without saying why it needs them.
_ARGUMENTS = 10


@cache
def pages() -> dict[str, str]:
    """Text of each Markdown file, by its path in the source tree."""
    return {str(path.relative_to(ROOT)): path.read_text() for path in source_files() if path.suffix == ".md"}


def _prose(text: str) -> str:
    """``text`` without its blocks of code."""
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def _anchors(text: str) -> set[str]:
    """The anchors that GitHub gives the headings of ``text``."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", _prose(text), re.MULTILINE):
        words = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()).strip()
        anchor, number = words.replace(" ", "-"), 0
        while anchor + (f"-{number}" if number else "") in found:
            number += 1
        found.add(anchor + (f"-{number}" if number else ""))
    return found


def broken_links(name: str, text: str) -> list[str]:
    """Relative links of page ``name`` that lead to no file, or to no heading of it."""
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", _prose(text)):
        if re.match(r"\w+:", target):
            continue
        path, _, anchor = target.partition("#")
        place = (ROOT / name).parent / path if path else ROOT / name
        if not place.exists() or (anchor and anchor not in _anchors(text if not path else place.read_text())):
            broken.append(f"{name}: {target}")
    return broken


def commands() -> Iterator[tuple[str, list[str]]]:
    """(page, words) of every command line in the pages: between backticks, and in blocks of bash."""
    for name, text in pages().items():
        if name == "CHANGELOG.md":
            continue
        blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        lines = [
            line
            for language, block in blocks
            if language in ("", "bash")
            for line in block.replace("\\\n", " ").splitlines()
        ]
        lines += re.findall(r"`([^`\n]+)`", _prose(text))
        for line in lines:
            if re.search(r"(?:^|/|\s)(?:make|uccl-ep|scripts/[\w-]+)(?:\s|$)", line):
                yield name, shlex.split(line, comments=True)


def test_the_readme_is_short() -> None:
    assert len(pages()["README.md"].splitlines()) <= _README_LINES


def test_relative_links_lead_somewhere() -> None:
    assert not [link for name, text in pages().items() for link in broken_links(name, text)]


@pytest.mark.parametrize("link", ["nowhere.md", "docs/settings.md#nowhere", "#nowhere", "docs/nowhere.md#nics"])
def test_a_broken_link_is_found(link: str) -> None:
    assert broken_links("README.md", f"# Here\n[a]({link}) [b](docs/settings.md#nics) [c](#here)") == [
        f"README.md: {link}"
    ]


def test_every_make_target_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {(name, words[words.index("make") + 1]) for name, words in commands() if "make" in words[:-1]}
    assert len(named) > 20
    assert not [one for one in named if one[1] not in targets]


def parse(words: list[str]) -> None:
    """Parse the words after ``uccl-ep`` as it would, without running anything. Raises what the parser does."""
    name, *options = words
    if words == ["--help"]:
        return
    if name not in {command.name for command in cli.app.registered_commands}:
        raise ValueError(f"no such command: {name}")
    if options:  # a command that is only named need not have what it requires
        module = importlib.import_module(f"uccl_ep_serving.cli.{name.replace('-', '_')}")
        typer.main.get_command(module.app).make_context(name, options)


def cli_lines() -> list[list[str]]:
    """The words after ``uccl-ep`` of every such line, and of ``make demo ARGS=...`` and its like."""
    found = []
    for _, words in commands():
        for at, word in enumerate(words):
            if word == "uccl-ep" or word.endswith("/uccl-ep"):
                found.append(words[at + 1 :])
            elif word.startswith("ARGS=") and words[at - 1] in ("demo", "demo-vllm"):
                found.append([words[at - 1], *shlex.split(word.removeprefix("ARGS="))])
    return [line for line in found if line]


def test_every_command_of_ours_parses() -> None:
    lines = cli_lines()
    assert {line[0] for line in lines} >= {"demo", "demo-vllm", "bench", "doctor", "plan", "top"}
    for line in lines:
        try:
            parse(line)
        except typer.Exit:
            assert "--help" in line
        except Exception as error:
            raise AssertionError(f"uccl-ep {shlex.join(line)}: {error}") from error


def test_an_option_that_does_not_exist_is_noticed() -> None:
    for line in (["plan", "--nothing"], ["demo", "--nothing"], ["nothing"]):
        with pytest.raises(Exception, match=r"[nN]o such"):
            parse(line)


def test_every_benchmark_that_is_named_has_a_result() -> None:
    named = {
        name
        for _, words in commands()
        if words[:2] == ["make", "bench"]
        for option in re.findall(r"--only ([\w,]+)", " ".join(words))
        for name in option.split(",")
    }
    assert named
    assert not [name for name in named if not (ROOT / f"benchmarks/results/{name}.json").is_file()]


@pytest.mark.parametrize("target", ["soak", "chaos", "fuzz"])
def test_every_option_of_the_long_runs_exists(target: str) -> None:
    named = {
        option
        for _, words in commands()
        if words[:2] == ["make", target]
        for option in re.findall(r"--\w+", str(words))
    }
    source = "".join(path.read_text() for path in source_files() if path.match(f"tests/{target}/*.py"))
    assert named
    assert not [option for option in named if not re.search(rf"\b{option.strip('-')}: Annotated", source)]


def test_every_script_that_is_named_exists() -> None:
    named = {word for _, words in commands() for word in words if word.startswith("scripts/")}
    assert named
    assert not [name for name in named if not (ROOT / name).is_file()]


def test_every_path_of_source_that_is_named_exists() -> None:
    """A name between backticks that ends in ``.py`` is the end of a path; the old names of decisions.md are not."""
    present = {f"/{path.relative_to(ROOT)}" for path in source_files()}
    text = {name: text for name, text in pages().items() if name != "CHANGELOG.md"}
    text["docs/architecture/decisions.md"] = re.sub(
        r"^\| `[^`]*` \|", "|", text["docs/architecture/decisions.md"], flags=re.MULTILINE
    )
    missing = []
    for name, page in text.items():
        for path in re.findall(r"`([\w/.]+\.py)[`:]", _prose(page)):
            foreign = name == "docs/vllm.md" or path == "ten_lines.py"  # vLLM's own files; the reader's
            if not foreign and not any(one.endswith(f"/{path}") for one in present):
                missing.append(f"{name}: {path}")
    assert not missing


def test_the_hops_of_a_token_exist() -> None:
    hops = re.findall(r"^\* `([\w/]+\.py)`: `(\w+)`", pages()["docs/architecture/overview.md"], re.MULTILINE)
    assert 15 < len(hops) <= _HOPS
    for path, name in hops:
        assert re.search(rf"^ *def {name}\(", (ROOT / path).read_text(), re.MULTILINE), f"{path}: {name}"


def unexplained(tree: ast.AST) -> list[str]:
    """Functions of ``tree`` with many arguments of which their docstring, or for a constructor the class's, says
    nothing. Those of a command are its options."""
    found = []
    for parent in ast.walk(tree):
        for function in ast.iter_child_nodes(parent):
            if not isinstance(function, ast.FunctionDef) or "app.command" in map(_called, function.decorator_list):
                continue
            given = function.args
            names = {one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)} - {"self"}
            documented = parent if isinstance(parent, ast.ClassDef) and function.name == "__init__" else function
            words = re.findall(r"\w+", ast.get_docstring(documented) or "")
            if len(names) > _ARGUMENTS and not {"arguments", "constants"} & set(words):
                found.append(function.name)
    return found


def _called(decorator: ast.expr) -> str:
    return ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)


def test_functions_with_many_arguments_say_why() -> None:
    assert [f"{path}: {name}" for path in python_sources() for name in unexplained(ast.parse(path.read_text()))] == []


def test_many_arguments_without_a_word_are_noticed() -> None:
    names = ", ".join(f"a{number}" for number in range(_ARGUMENTS + 1))
    assert unexplained(ast.parse(f"class A:\n    def f(self, {names}):\n        'Does it.'")) == ["f"]
    assert unexplained(ast.parse(f"def f({names}):\n    'Eleven arguments: as the kernel takes them.'")) == []


def test_every_variable_in_the_code_is_documented() -> None:
    settings = pages()["docs/settings.md"]
    named = re.compile(r"\bUCCL_EP_[A-Z][A-Z_]*[A-Z]\b")
    used = {name for path in python_sources() for name in named.findall(path.read_text())}
    assert used, "the pattern finds no variable at all"
    assert not sorted(name for name in used if f"`{name}`" not in settings)


def test_every_example_is_listed() -> None:
    listed = set(re.findall(r"^\| \[`?(\d\d_\w+(?:\.py)?)", pages()["examples/README.md"], re.MULTILINE))
    present = {path.name for path in (ROOT / "examples").iterdir() if path.name[0].isdigit()}
    assert present
    assert listed == present


def test_old_names_are_in_order() -> None:
    tables = re.findall(r"^\| old.*?\n\|[-|]+\n((?:\|.*\n)*)", pages()["docs/architecture/decisions.md"], re.MULTILINE)
    assert len(tables) == 2
    for table in tables:
        names = [row.split("|")[1].strip(" `").lower() for row in table.splitlines()]
        assert names == sorted(names)


class TestGeneratedTables:
    @pytest.fixture
    def docs(self) -> ModuleType:
        """``scripts/docs.py`` as a module."""
        return load_script("docs")

    def test_they_are_up_to_date(self, docs: ModuleType) -> None:
        assert docs.main(["--check"]) == 0, "run make docs"

    def test_check_notices_and_a_run_repairs(
        self, docs: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for name, _ in docs.TABLES:
            page = tmp_path / name
            page.parent.mkdir(parents=True, exist_ok=True)
            page.write_text((ROOT / name).read_text())
        page = tmp_path / "docs/architecture/formats.md"
        current = page.read_text()
        page.write_text(current.replace("| 37-48 | rank |", "| 37-47 | rank |"))
        assert docs.main(["--check"], tmp_path) == 1
        assert "docs/architecture/formats.md: out of date" in capsys.readouterr().out
        assert docs.main([], tmp_path) == 0
        assert page.read_text() == current

    def test_a_missing_marker_is_named(self, docs: ModuleType) -> None:
        with pytest.raises(ValueError, match="no markers for the table 'command'"):
            docs.render("docs/architecture/formats.md", "prose only")

    def test_every_setting_stands_in_one_table(self, docs: ModuleType) -> None:
        rows = [line for group in ("everyday", "nic", "debug") for line in docs.settings_table(group).splitlines()[2:]]
        assert len(rows) == len(docs.SETTINGS)
