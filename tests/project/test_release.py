"""What ``scripts/release.py`` refuses, skips and says. All of it with real environments: test_distribution.py."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest

from tests.support.bounded import run_bounded
from tests.support.source_tree import ROOT, installed_files, load_script


@pytest.fixture(scope="module")
def release() -> ModuleType:
    """``scripts/release.py`` as a module."""
    return load_script("release")


def in_wheel(release: ModuleType) -> dict[str, bytes]:
    """What a right wheel holds."""
    made = {f"{release.STEM}.dist-info/{name}": b"" for name in release._DIST_INFO}
    return {**{name: path.read_bytes() for name, path in installed_files().items()}, **made}


def in_sdist(release: ModuleType) -> dict[str, bytes]:
    """What a right sdist holds."""
    names = [path.relative_to(ROOT).as_posix() for path in installed_files().values()] + sorted(release._BESIDE)
    held = {name: (ROOT / name).read_bytes() for name in names}
    held.update(dict.fromkeys([*release._MADE, f"{release.NAME}.egg-info/PKG-INFO"], b""))
    return {f"{release.STEM}/{name}": content for name, content in held.items()}


def write_wheel(path: Path, held: dict[str, bytes], link: str | None = None) -> Path:
    """A wheel of ``held``, and of a symlink."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in held.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = (0o120777 if name == link else 0o100644) << 16
            archive.writestr(info, content)
    return path


def write_sdist(path: Path, held: dict[str, bytes], link: str | None = None) -> Path:
    """An sdist of ``held``, in which the file ``link`` is a symlink."""
    with tarfile.open(path, "w") as archive:
        for name, content in held.items():
            info = tarfile.TarInfo(name)
            if name == link:
                info.type, info.linkname = tarfile.SYMTYPE, "../kernels"
            else:
                info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


class TestContents:
    @pytest.mark.parametrize(
        ("name", "content", "fault"),
        [
            ("tests/test_config.py", b"", "tests/test_config.py does not belong there"),
            ("kernels/__init__.py", b"", "kernels/__init__.py does not belong there"),
            ("uccl_ep_serving/__pycache__/a.pyc", b"", "uccl_ep_serving/__pycache__/a.pyc does not belong there"),
            ("uccl_ep_serving/py.typed", None, "uccl_ep_serving/py.typed is missing"),
            ("uccl_ep_serving/compare/serving.html.j2", None, "uccl_ep_serving/compare/serving.html.j2 is missing"),
            ("uccl_ep_serving/proxy/loop.py", None, "uccl_ep_serving/proxy/loop.py is missing"),
            ("uccl_ep_serving/proxy/loop.py", b"x", "uccl_ep_serving/proxy/loop.py is not that of the source tree"),
            ("{stem}.dist-info/licenses/LICENSE", None, "{stem}.dist-info/licenses/LICENSE is missing"),
        ],
    )
    def test_of_a_wheel(
        self, release: ModuleType, tmp_path: Path, name: str, content: bytes | None, fault: str
    ) -> None:
        held, name = in_wheel(release), name.format(stem=release.STEM)
        assert release.wheel_faults(write_wheel(tmp_path / "right.whl", held)) == []
        if content is None:
            del held[name]
        else:
            held[name] = content
        assert release.wheel_faults(write_wheel(tmp_path / "wrong.whl", held)) == [fault.format(stem=release.STEM)]

    @pytest.mark.parametrize(
        ("name", "content", "fault"),
        [
            ("tests/test_config.py", b"", "tests/test_config.py does not belong there"),
            ("uccl_ep_serving/kernels/__init__.py", b"", "uccl_ep_serving/kernels/__init__.py does not belong there"),
            ("kernels/__init__.py", None, "kernels/__init__.py is missing"),
            ("LICENSE", None, "LICENSE is missing"),
            ("README.md", b"x", "README.md is not that of the source tree"),
        ],
    )
    def test_of_an_sdist(
        self, release: ModuleType, tmp_path: Path, name: str, content: bytes | None, fault: str
    ) -> None:
        held, name = in_sdist(release), f"{release.STEM}/{name}"
        assert release.sdist_faults(write_sdist(tmp_path / "right.tar", held)) == []
        if content is None:
            del held[name]
        else:
            held[name] = content
        assert release.sdist_faults(write_sdist(tmp_path / "wrong.tar", held)) == [fault]

    def test_symlinks_and_other_places(self, release: ModuleType, tmp_path: Path) -> None:
        wheel = write_wheel(tmp_path / "a.whl", in_wheel(release), link="uccl_ep_serving/py.typed")
        assert release.wheel_faults(wheel) == ["uccl_ep_serving/py.typed is a symlink"]
        link = f"{release.STEM}/uccl_ep_serving/kernels"
        sdist = write_sdist(tmp_path / "a.tar", {**in_sdist(release), link: b"", "elsewhere": b""}, link)
        odd = f"is outside {release.STEM}/, or neither a file nor a directory"
        assert release.sdist_faults(sdist) == [f"{link} {odd}", f"elsewhere {odd}"]

    def test_sizes_have_a_bound(self, release: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        files = (write_sdist(tmp_path / "a.tar", in_sdist(release)), write_wheel(tmp_path / "a.whl", in_wheel(release)))
        monkeypatch.setattr(release, "MOST_BYTES", 1 << 40)
        release.require_contents(*files)
        monkeypatch.setattr(release, "MOST_BYTES", 1000)
        with pytest.raises(release.Failed, match=r"a\.tar has [\d,]+ bytes, at most 1,000 are allowed"):
            release.require_contents(*files)


class TestBefore:
    """What is asked before anything is built."""

    @pytest.mark.parametrize("heading", ["## [Unreleased]", "## [{}]", "## [{}] - soon", "## [{}] - 2026-01-02\n## ["])
    def test_a_version_without_notes_is_refused(self, release: ModuleType, heading: str) -> None:
        with pytest.raises(release.Failed, match=rf"no notes under a heading '## \[{re.escape(release.VERSION)}\]"):
            release.require_notes(f"# Changelog\n\n{heading.format(release.VERSION)}\n")

    def test_notes_are_found(self, release: ModuleType) -> None:
        release.require_notes(f"## [Unreleased]\n\n## [{release.VERSION}] - 2026-01-02\n\n- all\n\n## [0.0.1] - soon\n")

    def test_changes_that_are_not_committed_are_refused(
        self, release: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        for words in (["init", "-q"], [*who, "commit", "-q", "--allow-empty", "-m", "first"]):
            subprocess.run(["git", *words], cwd=tmp_path, check=True, timeout=20)
        monkeypatch.setattr(release, "ROOT", tmp_path)
        assert re.fullmatch(r"commit [0-9a-f]{12}", release.require_commit(dirty=False))
        (tmp_path / "new.py").touch()
        with pytest.raises(
            release.Failed, match=r"1 files differ from commit \w+, the first is new\.py: .*ARGS=--dirty"
        ):
            release.require_commit(dirty=False)
        assert release.require_commit(dirty=True).endswith("and 1 files that differ from it")

    def test_no_repository_is_named(self, release: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(release, "ROOT", tmp_path)
        monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
        with pytest.raises(release.Failed, match=r"git rev-parse ended with status 128(?s:.)*not a git repository"):
            release.require_commit(dirty=True)


class TestPythons:
    @pytest.fixture(autouse=True)
    def nowhere(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """No Python on PATH, of pyenv or of uv."""
        monkeypatch.setenv("PATH", f"{tmp_path}/bin:/bin")
        for name in ("PYENV_ROOT", "XDG_DATA_HOME", "UV_PYTHON_INSTALL_DIR"):
            monkeypatch.setenv(name, str(tmp_path / name))

    @staticmethod
    def command(path: Path, text: str) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return path

    @pytest.mark.parametrize(
        "place",
        [
            "bin/python3.99",
            "PYENV_ROOT/versions/3.99.2/bin/python3.99",
            "UV_PYTHON_INSTALL_DIR/cpython-3.99.2-linux-x86_64-gnu/bin/python3.99",
        ],
    )
    def test_one_is_found(self, release: ModuleType, tmp_path: Path, place: str) -> None:
        python = self.command(tmp_path / place, "echo 3.99.2")
        assert release.find_python("3.99") == (python, "3.99.2")

    def test_one_of_pyenv_is_found_behind_its_shim(self, release: ModuleType, tmp_path: Path) -> None:
        self.command(tmp_path / "bin/python3.99", "echo 'pyenv: python3.99: command not found' >&2; exit 127")
        python = self.command(tmp_path / "PYENV_ROOT/versions/3.99.2/bin/python3.99", "echo 3.99.2")
        assert release.find_python("3.99") == (python, "3.99.2")

    def test_none_is_said_by_name(self, release: ModuleType, tmp_path: Path) -> None:
        assert release.find_python("3.99") == (None, "no python3.99 on PATH, of pyenv or of uv")
        python = self.command(tmp_path / "bin/python3.99", "echo \"No module named 'ensurepip'\" >&2; exit 1")
        assert release.find_python("3.99") == (
            None,
            f"{python} does not start, or lacks venv or ensurepip (No module named 'ensurepip')",
        )


class TestSteps:
    def test_a_step_that_fails_says_its_last_lines(self, release: ModuleType, tmp_path: Path) -> None:
        with pytest.raises(
            release.Failed, match=r"pip install ended with status 3; its last lines:\n    no such thing"
        ):
            release.run(
                "pip install",
                ["/bin/sh", "-c", "echo no such thing >&2; exit 3"],
                seconds=20,
                cwd=tmp_path,
                variables={},
            )

    def test_nothing_outlives_its_time(self, release: ModuleType, tmp_path: Path) -> None:
        """Not even a process in a session of its own, as torchrun's ranks are."""
        command = ["/bin/sh", "-c", "setsid sleep 60 & echo pid $!; wait"]
        begun = time.monotonic()
        with pytest.raises(
            release.Failed, match=r"the ranks took more than 0\.3 s; its last lines:\n    pid \d+"
        ) as caught:
            release.run("the ranks", command, seconds=0.3, cwd=tmp_path, variables=os.environ)
        assert time.monotonic() - begun < 10
        (pid,) = re.findall(r"pid (\d+)", str(caught.value))
        with contextlib.suppress(psutil.NoSuchProcess):
            killed = psutil.Process(int(pid))
            while killed.status() != psutil.STATUS_ZOMBIE and time.monotonic() - begun < 10:
                time.sleep(0.01)
            assert killed.status() == psutil.STATUS_ZOMBIE

    def test_nothing_of_this_environment_is_handed_on(
        self, release: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("PYTHONPATH", "VIRTUAL_ENV", "UCCL_EP_TRANSPORT"):
            monkeypatch.setenv(name, "ours")
        monkeypatch.setenv("PIP_CERT", "theirs")
        variables = release.environment(tmp_path)
        assert "ours" not in variables.values()
        assert variables["PIP_CERT"] == "theirs"
        assert variables["TMPDIR"].startswith(str(tmp_path))


class TestRelease:
    """``main`` with builds and environments that cost nothing."""

    @pytest.fixture(autouse=True)
    def stubs(self, release: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
        """What becomes of each Python: words, or an exception; one that is absent is not found."""
        (tmp_path / "tmp").mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
        monkeypatch.setattr(release, "signal", SimpleNamespace(SIGTERM=0, signal=lambda *_: None))
        pythons: dict[str, Any] = {}

        def build(_python: Path, _source: Path, to: Path, _variables: object) -> tuple[Path, Path]:
            files = (to / "a.tar.gz", to / "a.whl")
            for path in files:
                path.write_bytes(path.name.encode())
            return files

        def try_wheel(python: Path, *_: object) -> str:
            if isinstance(found := pythons[python.name], Exception):
                raise found
            return str(found)

        monkeypatch.setattr(release, "require_commit", lambda dirty: "commit abc")
        monkeypatch.setattr(release, "require_notes", lambda changelog: None)
        monkeypatch.setattr(release, "copy_source", lambda to: None)
        monkeypatch.setattr(release, "make_environment", lambda *_: Path("/python"))
        monkeypatch.setattr(release, "install", lambda *_, **__: None)
        monkeypatch.setattr(release, "run", lambda *_, **__: "")
        monkeypatch.setattr(release, "build", build)
        monkeypatch.setattr(release, "require_contents", lambda *_: None)
        monkeypatch.setattr(
            release, "find_python", lambda name: (Path(name), f"{name}.9") if name in pythons else (None, "none here")
        )
        monkeypatch.setattr(release, "try_wheel", try_wheel)
        return pythons

    def test_what_passed_is_in_dist_with_its_digests(
        self, release: ModuleType, stubs: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        stubs["3.11"] = stubs["3.13"] = "installed in 3 s"
        assert release.main(["--out", str(tmp_path / "dist")]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split(maxsplit=2) for line in lines if line.startswith("Python")] == [
            ["Python", "3.11.9", "installed in 3 s"],
            ["Python", "3.12", "SKIPPED: none here"],
            ["Python", "3.13.9", "installed in 3 s"],
        ]
        for name in ("a.tar.gz", "a.whl"):
            content = (tmp_path / "dist" / name).read_bytes()
            assert content == name.encode()
            assert any(line.startswith(name) and line.endswith(hashlib.sha256(content).hexdigest()) for line in lines)
        assert list((tmp_path / "tmp").iterdir()) == []

    def test_one_that_failed_keeps_dist_as_it_is(
        self, release: ModuleType, stubs: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        stubs.update({"3.11": release.Failed("pip check failed:\n  a lacks b"), "3.12": "installed in 3 s"})
        assert release.main(["--out", str(tmp_path / "dist")]) == 1
        said = capsys.readouterr()
        assert "Python 3.11.9   FAILED: pip check failed:\nPython 3.12.9   installed in 3 s\n" in said.out
        assert "release: Python 3.11.9: pip check failed:\n  a lacks b\n" in said.err
        assert said.err.endswith("failed with Python 3.11.9, see above\n")
        assert [path.name for path in tmp_path.iterdir()] == ["tmp"]
        assert list((tmp_path / "tmp").iterdir()) == []

    def test_without_any_python_nothing_is_released(
        self, release: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert release.main(["--python", "3.12", "--out", str(tmp_path / "dist")]) == 1
        assert "no Python of 3.12 is here to try the wheel with" in capsys.readouterr().err
        assert not (tmp_path / "dist").exists()


def test_every_python_that_is_tried_is_a_classifier(release: ModuleType) -> None:
    listed = set(release.PYPROJECT["project"]["classifiers"])
    assert {f"Programming Language :: Python :: {version}" for version in release.PYTHONS} <= listed


def test_being_stopped_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    code = (
        "import os, signal, sys; sys.argv[1:] = []\n"
        "from tests.support.source_tree import load_script\n"
        "release = load_script('release')\n"
        "release.release = lambda *_: os.kill(os.getpid(), signal.SIGTERM)\n"
        "sys.exit(release.main([]))"
    )
    variables = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    ran = run_bounded([sys.executable, "-c", code], seconds=30, cwd=tmp_path, environment=variables)
    assert ran.returncode == 143, ran.stdout
    assert list((tmp_path / "tmp").iterdir()) == []
