"""``uccl-ep`` itself: what a command imports before it is asked to compute, for that is how long it takes to start."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.support.source_tree import run_python
from uccl_ep_serving.cli import compare_serving, main

CODE = """
import sys
from uccl_ep_serving.cli.main import app
try:
    app({arguments!r})
except SystemExit as ended:
    status = ended.code
heavy = sorted({{"torch", "numba", "triton", "sglang", "vllm"}} & set(sys.modules))
print(status, heavy, file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        ("--help", 0),
        ("plan --ranks 8 --experts 64", 0),
        ("top --json --pid 999999999", 1),
        ("top --once --pid 999999999", 1),
        ("bench --help", 0),
        ("doctor --help", 0),
        ("warm --help", 0),
        ("export --help", 0),
        ("check --help", 0),
        ("check --nnodes 2", 2),
        ("check --gpu --only nothing", 2),
        ("demo --help", 0),
        ("demo-vllm --help", 0),
    ],
)
def test_light_commands_import_nothing_heavy(tmp_path: Path, arguments: str, status: int) -> None:
    done = run_python(CODE.format(arguments=arguments.split()), cwd=tmp_path)
    assert done.stderr.splitlines()[-1] == f"{status} []", done.stderr


def test_a_terminal_of_ascii_gets_no_traceback(tmp_path: Path) -> None:
    done = run_python(CODE.format(arguments=["bench", "--help"]), cwd=tmp_path, PYTHONIOENCODING="ascii", COLUMNS="50")
    assert done.stderr.splitlines()[-1] == "0 []", done.stderr
    assert "?" in done.stdout  # for an ellipsis


def test_the_doctor_asks_torch_only_where_it_may_find_a_gpu(tmp_path: Path) -> None:
    """Importing torch takes longer than all that the doctor does."""
    import torch

    for_gpus = torch.version.cuda is not None or torch.version.hip is not None
    done = run_python(CODE.format(arguments=["doctor", "--json"]), cwd=tmp_path)
    _, _, heavy = done.stderr.splitlines()[-1].partition(" ")
    assert ("torch" in heavy) == for_gpus, done.stderr
    assert not {"numba", "triton", "sglang", "vllm"} & set(ast.literal_eval(heavy))


#: The ranks of a command are not started.
ALONE = """
from uccl_ep_serving.cli import ranks
from uccl_ep_serving.preflight import report
from uccl_ep_serving.preflight.outcome import Outcome
ranks.run_ranks = lambda *_: None
report.run_node = lambda *_: Outcome([])
"""


@pytest.mark.parametrize("arguments", ["bench", "compare", "check --json"])
def test_who_only_starts_ranks_leaves_torch_to_them(tmp_path: Path, arguments: str) -> None:
    """On a GPU build of torch ``check`` asks it how many there are."""
    import torch

    for_gpus = torch.version.cuda is not None or torch.version.hip is not None
    code = ALONE + CODE.format(arguments=arguments.split())
    done = run_python(code, cwd=tmp_path, UCCL_EP_CACHE_DIR=str(tmp_path))
    said = done.stderr.splitlines()[-1]
    assert said == "0 []" or (for_gpus and arguments.startswith("check")), done.stderr


def test_all_that_follows_the_word_is_the_commands_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The -- as well, behind which stand the options of another program."""
    told: list[list[str]] = []
    monkeypatch.setattr(compare_serving, "app", lambda args, prog_name: told.append(args))
    line = ["--starts", "2", "--", "sglang", "serve", "--model-path", "x", "--help"]
    main.app(["compare-serving", *line], standalone_mode=False)
    assert told == [line]
