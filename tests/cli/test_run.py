"""``uccl-ep run``: a module with its own arguments, after the plugins of the engine that it belongs to."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from uccl_ep_serving.cli import run


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory whose modules can be imported, with stand-ins for both engines that note when plugins are loaded."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "argv", [])
    for engine, (package, function) in run._LOADERS.items():
        for name in [name for name in sys.modules if name == engine or name.startswith(f"{engine}.")]:
            monkeypatch.delitem(sys.modules, name)
        folder = tmp_path
        for part in package.split("."):
            folder = folder / part
            folder.mkdir()
            (folder / "__init__.py").write_text("")
        (folder / "__init__.py").write_text(f"def {function}():\n    print('loaded {engine}')\n")
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] in run._LOADERS]:
        del sys.modules[name]


def ran(*arguments: str) -> Any:
    return CliRunner().invoke(run.app, list(arguments))


TOOL = "import sys\nprint('main', __name__, sys.argv[1:])\n"


@pytest.mark.parametrize(
    ("module", "loaded"),
    [("sglang.tool", ["sglang"]), ("vllm.tool", ["vllm"]), ("router", ["sglang", "vllm"])],
)
def test_plugins_are_loaded_before_the_module_runs(place: Path, module: str, loaded: list[str]) -> None:
    (place / f"{module.replace('.', '/')}.py").write_text(TOOL)
    result = ran(module, "--help", "--tp", "8", "x")
    assert result.output.splitlines() == [
        *(f"loaded {one}" for one in loaded),
        "main __main__ ['--help', '--tp', '8', 'x']",
    ]


def test_an_exit_status_is_the_modules(place: Path) -> None:
    (place / "vllm" / "tool.py").write_text("raise SystemExit(7)\n")
    assert ran("vllm.tool").exit_code == 7


def test_a_module_that_is_not_there_is_named(place: Path) -> None:
    for module in ("sglang.no_such_tool", "no_such_package.tool"):
        result = ran(module)
        assert result.exit_code == 2
        assert f"there is no module {module} in this environment" in result.output
    assert "loaded" not in result.output


@pytest.mark.parametrize("module", ["", "__main__", ".tool"])
def test_what_names_no_module_is_refused(place: Path, module: str) -> None:
    result = ran(module)
    assert result.exit_code == 2
    assert f"there is no module {module} in this environment" in result.output


@pytest.mark.parametrize("package", ["sglang", "sglang.srt", "json"])
def test_a_package_that_cannot_be_run_is_told_before_plugins_are_loaded(place: Path, package: str) -> None:
    result = ran(package)
    assert result.exit_code == 2
    assert f"{package} is a package without a __main__, so it cannot be run itself. Next step: name" in result.output
    assert "loaded" not in result.output
    assert package == "json" or package not in sys.modules


def test_a_package_with_a_main_is_run(place: Path) -> None:
    (place / "vllm" / "__main__.py").write_text(TOOL)
    assert ran("vllm", "x").output.splitlines() == ["loaded vllm", "main __main__ ['x']"]


def test_help_is_ours_before_the_module() -> None:
    assert "What follows MODULE goes to it" in " ".join(ran("--help").output.split())


SPAWNING = """
import multiprocessing

def child(queue):
    queue.put("from the child")

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    print(queue.get())
    process.join()
"""


def test_what_a_module_spawns_finds_the_module(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``multiprocessing`` imports the main module again in a new process, by its name."""
    monkeypatch.setenv("PYTHONPATH", str(place))
    (place / "vllm" / "tool.py").write_text(SPAWNING)
    others = set(multiprocessing.active_children())  # ranks that wait for the next test
    assert "from the child" in ran("vllm.tool").output
    assert set(multiprocessing.active_children()) <= others
