"""The project as a whole: its layout, imports and documentation agree with each other."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.support.source_tree import (
    PACKAGE,
    PYPROJECT,
    ROOT,
    python_sources,
    run_python,
    source_files,
    through_symlink,
)
from uccl_ep_serving.engines.versions import SGLANG, VLLM, Standing

# Commands may end their own process. The CPU shims run only in servers that the demo or a test starts: SGLang logs a
# failing plugin and goes on, so that leaving is the only way not to serve with half of them.
MAY_EXIT = re.compile(r"uccl_ep_serving/(cli/\w+|(demo|bench)/\w+|demo/(sglang|vllm)_cpu/__init__|.*/__main__)\.py")

# names that say nothing about what a file holds
VAGUE = {"utils", "util", "common", "manager", "helper", "helpers", "misc"}

# modules in which a verbs library may be named; the doctor asks pyverbs for a second opinion
NICS = ("verbs", "nic")
VERBS = {str(path.relative_to(ROOT)) for folder in NICS for path in ROOT.glob(f"proxy/transport/{folder}/*.py")}
VERBS |= {"uccl_ep_serving/cli/doctor/verbs.py"}
# the setting, who asks what it comes to, and the peer that the check drives
VERBS |= {"uccl_ep_serving/variables.py", "uccl_ep_serving/data_plane/nics.py"}
VERBS |= {f"uccl_ep_serving/preflight/{name}.py" for name in ("loopback", "pyverbs_peer")}


class TestLayout:
    def test_every_package_is_listed(self) -> None:
        listed = set(PYPROJECT["tool"]["setuptools"]["packages"])
        found = set()
        for place, name in ((PACKAGE, "uccl_ep_serving"), (ROOT / "kernels", None), (ROOT / "proxy", None)):
            for path in place.rglob("__init__.py"):
                if through_symlink(path):
                    continue
                parts = path.parent.relative_to(ROOT).parts
                found.add(".".join(parts if name else ("uccl_ep_serving", *parts)))
        assert listed == found

    @pytest.mark.parametrize("name", ["kernels", "proxy"])
    def test_symlinks_lead_to_the_top_level(self, name: str) -> None:
        link = PACKAGE / name
        assert link.is_symlink()
        assert os.readlink(link) == f"../{name}"

    def test_file_names_say_what_is_inside(self) -> None:
        vague = [path for path in source_files() if set(re.split(r"[_.]", path.name)[:-1]) & VAGUE]
        assert not vague

    def test_nothing_names_a_machine(self) -> None:
        pattern = re.compile(r"(?<![\w.])/(?:work|root|home/\w+)/|https?://[^/\s]*pypi|[-]index-url\b")
        found = []
        for path in source_files():
            text = path.read_text(errors="ignore")
            found += [f"{path.relative_to(ROOT)}: {match.group()}" for match in pattern.finditer(text)]
        assert not found

    def test_nothing_ends_the_process(self) -> None:
        ends = {("os", "_exit"), ("os", "abort"), ("sys", "exit")}
        found = []
        for path in python_sources():
            for node in ast.walk(ast.parse(path.read_text())):
                if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)):
                    continue
                if (node.value.id, node.attr) in ends:
                    found.append(str(path.relative_to(ROOT)))
        assert not [name for name in found if not MAY_EXIT.fullmatch(name)]

    def test_only_the_rdma_transports_name_a_verbs_library(self) -> None:
        pattern = re.compile(r"pyverbs|libibverbs|libefa")
        named = {str(path.relative_to(ROOT)) for path in python_sources() if pattern.search(path.read_text())}
        assert named <= VERBS


class TestRequirements:
    # of vLLM, of SGLang, and the newest that the tests of kernels and proxies have run with
    @pytest.mark.parametrize("version", ["0.65.0", "0.65.1", "0.68.1"])
    def test_the_numba_that_each_engine_pins_is_accepted(self, version: str) -> None:
        for texts in (metadata.requires("uccl_ep_serving") or [], PYPROJECT["project"]["dependencies"]):
            (numba,) = [one for one in map(Requirement, texts) if one.name == "numba"]
            assert numba.specifier.contains(version)

    def test_the_extra_of_sglang_brings_the_version_that_tests_serve_with(self) -> None:
        (pin,) = map(Requirement, PYPROJECT["project"]["optional-dependencies"]["sglang"])
        (only,) = pin.specifier
        assert (pin.name, only.operator) == ("sglang", "==")
        assert SGLANG.look_up(only.version)[0] is Standing.SUPPORTED

    def test_the_extra_of_vllm_takes_the_versions_that_tests_run_on(self) -> None:
        """Those that serve on a CPU and those of which there are only sources; the newest where none is there yet."""
        (wanted,) = map(Requirement, PYPROJECT["project"]["optional-dependencies"]["vllm"])
        lists = "".join((ROOT / f"requirements/vllm-{name}.txt").read_text() for name in ("cpu-wheel", "versions"))
        tested = sorted(Version(found) for found in re.findall(r"^vllm\S*==(\S+)", lists, re.MULTILINE))
        assert all(wanted.specifier.contains(one) for one in tested)
        assert all(VLLM.look_up(str(one))[0] in (Standing.SUPPORTED, Standing.READ) for one in tested)
        first, last = tested[0].release, tested[-1].release
        assert not wanted.specifier.contains(f"{first[0]}.{first[1] - 1}.9")
        assert not wanted.specifier.contains(f"{last[0]}.{last[1] + 1}.0")


class TestImports:
    @pytest.mark.parametrize("name", ["kernels", "proxy"])
    def test_top_level_name_is_refused(self, name: str) -> None:
        done = run_python(f"import {name}", cwd=ROOT, PYTHONSAFEPATH="")
        assert done.returncode == 1
        assert f"ImportError: '{name}' resolved to the uccl_ep_serving source tree" in done.stderr
        assert "PYTHONSAFEPATH=1" in done.stderr

    def test_the_checkout_is_not_on_the_path_elsewhere(self, tmp_path: Path) -> None:
        code = "from importlib.util import find_spec as f; print(f('proxy'), f('uccl_ep_serving.proxy').name)"
        # the developer may have put the checkout there for good: what is asked is what an installation does
        assert run_python(code, cwd=tmp_path, PYTHONPATH="").stdout.split() == ["None", "uccl_ep_serving.proxy"]

    def test_importing_the_package_has_no_side_effect(self, tmp_path: Path) -> None:
        code = (
            "import json, sys, threading, time; before = set(sys.modules); start = time.perf_counter()\n"
            "import uccl_ep_serving\n"
            "loaded = sorted({name.partition('.')[0] for name in set(sys.modules) - before})\n"
            "print(json.dumps([time.perf_counter() - start, loaded, threading.active_count()]))"
        )
        done = run_python(code, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        seconds, loaded, threads = json.loads(done.stdout)
        assert not {"torch", "numba", "sglang", "vllm"} & set(loaded)
        assert threads == 1
        # a few milliseconds in truth; a second would mean that something heavy is being imported
        assert seconds < 1.0
        assert not list(tmp_path.iterdir())

    def test_importing_the_buffer_brings_what_every_buffer_needs(self, tmp_path: Path) -> None:
        """What one kind of tensor, NIC or command needs comes when it is asked for."""
        code = (
            "import sys, torch; before = set(sys.modules)\n"
            "import uccl_ep_serving.buffer; print(*set(sys.modules) - before)"
        )
        loaded = set(run_python(code, cwd=tmp_path).stdout.split())
        assert "uccl_ep_serving.data_plane.runtime" in loaded
        assert not {"numba", "packaging", "pydantic", "rich", "sglang", "triton", "typer", "vllm"} & loaded
        asked_for = (
            "bench|cli|demo|engines|gpu.context|kernels.(cpu|triton)|modes.\\w+_(cpu|gpu)|oracle|proxy.transport.nic"
        )
        assert not [name for name in loaded if re.match(rf"uccl_ep_serving\.({asked_for})\b", name)]

    def test_exported_names_exist(self) -> None:
        package = importlib.import_module("uccl_ep_serving")
        assert package.__all__ == sorted(package.__all__)
        missing = [name for name in package.__all__ if not hasattr(package, name)]
        assert not missing
        assert set(package.__all__) <= set(dir(package))

    def test_exports_what_the_engines_import(self) -> None:
        package = importlib.import_module("uccl_ep_serving")
        assert {"Buffer", "Config", "EventOverlap", "UcclEpError"} <= set(package.__all__)

    def test_exports_every_exception(self) -> None:
        errors = importlib.import_module("uccl_ep_serving.errors")
        kinds = {name for name in errors.__all__ if isinstance(getattr(errors, name), type)}
        assert kinds <= set(importlib.import_module("uccl_ep_serving").__all__)

    def test_unknown_name_is_refused(self) -> None:
        package = importlib.import_module("uccl_ep_serving")
        with pytest.raises(AttributeError, match="no_such_name"):
            package.no_such_name  # noqa: B018

    def test_version_is_written_once(self) -> None:
        version = PYPROJECT["project"]["version"]
        assert metadata.version("uccl_ep_serving") == version
        literal = [path for path in python_sources() if f'"{version}"' in path.read_text()]
        assert not literal
