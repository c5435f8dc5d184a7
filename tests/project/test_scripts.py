"""Scripts that fetch or pin what the project stands on: a failure is said, and nothing half done is taken for whole."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

from tests.support.source_tree import PYPROJECT, ROOT, load_script

VERSIONS = re.findall(r"^vllm\S+", (ROOT / "requirements/vllm-versions.txt").read_text(), re.MULTILINE)


def command(path: Path, text: str) -> None:
    """An executable of ``text`` for a shell."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


class TestVllmVersions:
    """``scripts/vllm-versions`` with an environment whose pip fetches nothing and whose tests always pass."""

    def run(self, venv: Path, unpack: str) -> subprocess.CompletedProcess[str]:
        """``unpack`` stands for the program that unpacks a wheel into "$2/sources"."""
        command(venv / "bin/python", f'[ "$1" = - ] || exit 0\n{unpack}')
        command(venv / "bin/pytest", 'echo "tested on $(ls "$PYTHONPATH")"')
        environment = {**os.environ, "VENV": str(venv)}
        return subprocess.run(
            [ROOT / "scripts/vllm-versions"], env=environment, capture_output=True, text=True, timeout=60, check=False
        )

    def test_each_version_is_fetched_once_and_tested(self, tmp_path: Path) -> None:
        for _ in range(2):
            ran = self.run(tmp_path, 'mkdir "$2/sources" && touch "$2/sources/whole"')
            assert ran.returncode == 0, ran.stderr
            assert ran.stdout.count("tested on whole") == len(VERSIONS)
        assert "fetching" not in ran.stdout

    @pytest.mark.parametrize(
        "before", ["", 'mkdir "$2/sources"; touch "$2/sources/half"; '], ids=["nothing", "half of them"]
    )
    def test_sources_that_cannot_be_unpacked_are_neither_tested_nor_kept(self, tmp_path: Path, before: str) -> None:
        ran = self.run(tmp_path, f"{before}exit 1")
        assert ran.returncode == 1
        assert "tested" not in ran.stdout
        assert ran.stderr.count("(not fetched)") == len(VERSIONS)
        assert list((tmp_path / "vllm-versions").iterdir()) == []


class TestFreeze:
    """``scripts/freeze.py`` refuses before it writes where a list would lose its pins."""

    @pytest.fixture
    def freeze(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
        """The script on a copy of the lists."""
        module = load_script("freeze")
        for name in ["pyproject.toml", *(f"requirements/{path.name}" for path in (ROOT / "requirements").iterdir())]:
            copy = tmp_path / name
            copy.parent.mkdir(exist_ok=True)
            copy.write_bytes((ROOT / name).read_bytes())
        monkeypatch.setattr(module, "ROOT", tmp_path)
        return module

    @pytest.mark.parametrize("absent", ["sglang", "triton", "ruff"])
    def test_an_environment_that_lacks_something(
        self, freeze: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, absent: str
    ) -> None:
        extras = PYPROJECT["project"]["optional-dependencies"]
        wanted = [*PYPROJECT["project"]["dependencies"], *extras["dev"], *extras["test"], "triton", *extras["sglang"]]
        names = {Requirement(text).name for text in wanted} - {absent}
        installed = {name: f"{name}-1.dist-info" for name in names}
        for name, place in installed.items():
            (tmp_path / "site" / place).mkdir(parents=True)
            (tmp_path / "site" / place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        found = list(metadata.distributions(path=[str(tmp_path / "site")]))
        monkeypatch.setattr(metadata, "distributions", lambda: found)
        with pytest.raises(SystemExit, match=rf"not installed here: {absent}\."):
            freeze.main()
        for path in (ROOT / "requirements").iterdir():
            assert (tmp_path / "requirements" / path.name).read_bytes() == path.read_bytes()


class TestGuest:
    """``tests/rdma/guest/fetch`` and ``scripts/test-rdma``, which says why there is no guest."""

    def test_a_machine_that_cannot_says_what_it_takes(self, tmp_path: Path) -> None:
        command(tmp_path / "bin/apt-get", "echo 'E: no archive'; exit 100")
        command(tmp_path / "bin/dpkg-deb", "exit 1")
        command(tmp_path / "bin/uname", "echo x86_64")
        environment = {
            **os.environ,
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
            "VENV": sys.prefix,
            "RDMA_GUEST": str(tmp_path / "guest"),
        }
        ran = subprocess.run(
            [ROOT / "scripts/test-rdma"], env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert ran.returncode == 0
        assert ran.stdout.startswith("test-rdma: SKIPPED: apt-get update failed: E: no archive. It takes a Debian 12")
        assert len(ran.stdout.splitlines()) == 1
        for package in ("qemu-system-x86", "kmod", "cpio", "ibverbs-utils", "libibverbs-dev", "linux-image-amd64"):
            assert package in ran.stdout
        assert "rdma guest: fetching packages" in ran.stderr
