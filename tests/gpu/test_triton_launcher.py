"""What ``Launch.run`` gives to Triton's launcher of a kernel is what Triton gives to it, by Triton's own source: one
call for CUDA and for ROCm."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

from tests.kernels.other_tritons import other_tritons

pytest.importorskip("triton")

#: Of ``Launch.run``, which leaves out the hooks: it is not taken while there are any.
GIVEN = [
    *("grid_0", "grid_1", "grid_2", "stream", "kernel.function", "kernel.packed_metadata", "launch_metadata"),
    *("knobs.runtime.launch_enter_hook", "knobs.runtime.launch_exit_hook", "*bound_args.values()"),
]
LAUNCHER = ["self", "gridX", "gridY", "gridZ", "stream", "function"]
REST = ["kernel_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook"]


def root(place: str) -> Path:
    """Of the package in ``place``, "" for the installed one."""
    found = importlib.util.find_spec("triton")
    assert found is not None
    assert found.origin is not None
    return Path(place) / "triton" if place else Path(found.origin).parent


@pytest.mark.parametrize("place", [pytest.param("", id="installed"), *other_tritons()])
def test_triton_launches_a_kernel_with_these_arguments(place: str) -> None:
    tree = ast.parse((root(place) / "runtime/jit.py").read_text())
    calls = [
        [ast.unparse(argument) for argument in node.args]
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "kernel.run"
    ]
    assert calls == [GIVEN]


@pytest.mark.parametrize("backend", ["nvidia", "amd"])
@pytest.mark.parametrize("place", [pytest.param("", id="installed"), *other_tritons()])
def test_launchers_of_both_makers_take_them(place: str, backend: str) -> None:
    tree = ast.parse((root(place) / f"backends/{backend}/driver.py").read_text())
    (launcher,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name.endswith("Launcher")]
    (call,) = [node for node in launcher.body if isinstance(node, ast.FunctionDef) and node.name == "__call__"]
    names = [argument.arg for argument in call.args.args]
    # the C launcher takes the rest where Python's does not
    assert names in (LAUNCHER, LAUNCHER + REST)
    assert call.args.vararg is not None
