"""Every call of cuda-bindings that the product makes, made for real with the releases that users have: a code of the
driver comes back, never a TypeError or an AttributeError."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.cuda_driver import build
from tests.support.source_tree import python_sources

#: By name, results beside the code, the fewest where releases differ; None for what is no function.
USED = {
    "cudaDeviceAttr": None,
    "cudaDeviceGetAttribute": 1,
    "cudaFree": 0,
    "cudaGetErrorString": 1,
    "cudaHostGetDevicePointer": 1,
    "cudaHostRegister": 0,
    "cudaHostUnregister": 0,
    "cudaIpcCloseMemHandle": 0,
    "cudaIpcGetMemHandle": 1,
    "cudaIpcMemHandle_t": None,
    "cudaIpcOpenMemHandle": 1,
    "cudaMalloc": 1,
    "cudaMemset": 0,
    # status, number, graph, dependencies, (edges,) count
    "cudaStreamGetCaptureInfo": 5,
    "CUmemRangeHandleType": None,
    "cuGetErrorString": 1,
    "cuMemGetHandleForAddressRange": 1,
}
#: What a method of ``CudaMemory`` says where the runtime library refuses: the function that it names.
REFUSED = {
    "map_host": "cudaHostRegister",
    "unmap_host": "cudaHostUnregister",
    "allocate": "cudaMalloc",
    "free": "cudaFree",
    "export": "cudaIpcGetMemHandle",
    "open": "cudaIpcOpenMemHandle",
    "close": "cudaIpcCloseMemHandle",
    "capture_of": "cudaStreamGetCaptureInfo",
    "nic_writes": "cudaDeviceGetAttribute",
    "driver_flush": "cudaFree",
    # reached once what comes before it is done
    "memset": "cudaMemset",
    "device pointer": "cudaHostGetDevicePointer",
}


def modules_of(tree: ast.Module) -> set[str]:
    """The names, as written, that a module of cuda-bindings has in a source."""
    names = set()
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[target], value=value) | ast.AnnAssign(target=target, value=value):
                if value is not None and "cuda.bindings" in ast.unparse(value):
                    names.add(ast.unparse(target))
    return names


def used_by(source: Path) -> set[str]:
    """Names of cuda-bindings that a source of the product uses: attributes of its modules, and those that ``_call`` and
    ``_results`` are told without ``cuda``."""
    tree = ast.parse(source.read_text())
    modules, found = modules_of(tree), set()
    # ROCm's functions have the same names after another prefix
    others = {
        node for one in tree.body if isinstance(one, ast.ClassDef) and "Hip" in one.name for node in ast.walk(one)
    }
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=value, attr=name) if ast.unparse(value) in modules:
                found.add(name)
            case ast.Call(func=ast.Attribute(attr="_call" | "_results"), args=[ast.Constant(value=str(name)), *_]):
                found |= {f"cuda{name}"} if node not in others else set()
    return found


def sources() -> list[Path]:
    """Those that name cuda-bindings as a module."""
    return [path for path in python_sources() if "cuda.bindings" in path.read_text()]


def test_each_name_that_the_product_uses_is_tried() -> None:
    assert [path.name for path in sources()] == ["memory.py"]
    assert set.union(*map(used_by, sources())) == USED.keys()


def test_how_names_are_found(tmp_path: Path) -> None:
    """A new call is seen, whichever way it is made."""
    source = tmp_path / "source.py"
    source.write_text(
        'class A:\n    def f(self):\n        self._rt: Any = import_module("cuda.bindings.runtime")\n'
        '        self._rt.cudaOne(1)\n        self._call("Two", 2)\n        self._results("Three")\n'
        '        d = import_module("cuda.bindings.driver")\n        d.cuFour()\n        other.cudaNo()\n'
        'class HipB:\n    def f(self):\n        self._call("No")\n'
    )
    assert used_by(source) == {"cudaOne", "cudaTwo", "cudaThree", "cuFour"}


def releases() -> list[Any]:
    """The installed release, and those in CUDA_BINDINGS, directories as ``scripts/cuda-bindings`` prints them."""
    lacking = build.LACKING or ("" if importlib.util.find_spec("cuda") else "cuda-bindings is not installed")
    found = [pytest.param("", id="installed", marks=pytest.mark.skipif(bool(lacking), reason=lacking))]
    for place in filter(None, os.environ.get("CUDA_BINDINGS", "").split(os.pathsep)):
        why = build.LACKING or ("" if (Path(place) / "cuda").is_dir() else f"cuda-bindings is not in {place}")
        marks = pytest.mark.skipif(bool(why), reason=why)
        found.append(pytest.param(place, id=Path(place).name, marks=marks))
    return found


@pytest.fixture(scope="module", params=releases())
def said(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What :mod:`.bindings_calls` prints."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "tests.gpu.bindings_calls"],
        env=build.environment(request.param),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout)
    # a directory's name begins the version of what is in it
    assert found["release"].startswith(Path(request.param).name)
    return found


def test_each_call_is_made_as_the_release_has_it(said: dict[str, Any]) -> None:
    used = said["used"]
    assert used.keys() == USED.keys()
    assert {name: results for name, results in used.items() if name != "cudaStreamGetCaptureInfo"} == {
        name: results for name, results in USED.items() if name != "cudaStreamGetCaptureInfo"
    }
    assert used["cudaStreamGetCaptureInfo"] >= 5


def test_an_error_is_named_with_the_drivers_words(said: dict[str, Any]) -> None:
    for method, function in REFUSED.items():
        words = said["said"][method]
        assert words.startswith(f"TransportError: {function} failed on cuda:0: operation not supported (801)"), method
        assert "Next step: " in words
    assert said["said"]["export_dmabuf"].startswith(
        "TransportError: cuda:0 exports no dma-buf of its memory: invalid argument (1)"
    )


def test_handles_have_all_their_bytes(said: dict[str, Any]) -> None:
    assert (said["opened"], said["exported"]) == (True, True)


def test_the_driver_is_asked_for_whole_pages_and_by_address_for_a_flush(said: dict[str, Any]) -> None:
    asked = [call for call in said["calls"] if call[0].startswith(("cuMem", "cuCtxSet", "cuFlush"))]
    assert asked == [
        # bytes, dma-buf, no flags
        ["cuMemGetHandleForAddressRange", str(os.sysconf("SC_PAGESIZE")), "1", "0"],
        ["cuCtxSetCurrent", "0x90"],
        # target, scope
        ["cuFlushGPUDirectRDMAWrites", "0", "200"],
    ]
    assert said["offset"] == 16
    assert said["flushed"] == [0, 0]
    assert {said["said"][name] for name in ("dma-buf", "handle", "flush")} == {"done"}
