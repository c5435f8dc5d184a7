"""The wheel and the sdist hold the whole package, under its installed names, and work anywhere."""

from __future__ import annotations

import hashlib
import os
import re
import sys
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.bounded import run_bounded
from tests.support.source_tree import ROOT, copy_source, load_script, run_python


@pytest.fixture(scope="module")
def release() -> ModuleType:
    """``scripts/release.py`` as a module."""
    return load_script("release")


@pytest.mark.long
class TestDistribution:
    @pytest.fixture(scope="class")
    @staticmethod
    def archives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
        """The wheel built from the checkout, the sdist, and the wheel built from that sdist."""
        place = tmp_path_factory.mktemp("dist")
        source = place / "source"
        copy_source(source)

        def build(kind: str, tree: Path) -> Path:
            out = place / f"{kind}-of-{tree.name}"
            out.mkdir()
            call = f"from setuptools import build_meta as b; print(b.build_{kind}({str(out)!r}))"
            done = run_python(call, cwd=tree)
            assert done.returncode == 0, done.stderr
            return out / done.stdout.split()[-1]

        sdist = build("sdist", source)
        with tarfile.open(sdist) as archive:
            archive.extractall(place / "unpacked", filter="data")
        (unpacked,) = (place / "unpacked").iterdir()
        return {"sdist": sdist, "wheel": build("wheel", source), "again": build("wheel", unpacked)}

    @pytest.mark.parametrize("which", ["wheel", "again"])
    def test_contents(self, release: ModuleType, archives: dict[str, Path], which: str) -> None:
        release.require_contents(archives["sdist"], archives[which])

    def test_wheel_works_away_from_the_checkout(self, archives: dict[str, Path], tmp_path: Path) -> None:
        zipfile.ZipFile(archives["wheel"]).extractall(tmp_path / "site")
        (tmp_path / "cwd").mkdir()
        # -S in spirit: the editable install of this environment must not answer instead
        code = (
            "import sys; sys.meta_path = [f for f in sys.meta_path if 'editable' not in repr(f).lower()]\n"
            "import uccl_ep_serving.kernels, uccl_ep_serving.proxy, uccl_ep_serving.config\n"
            "print(uccl_ep_serving.proxy.__file__)"
        )
        done = run_python(code, cwd=tmp_path / "cwd", PYTHONPATH=str(tmp_path / "site"))
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == str(tmp_path / "site" / "uccl_ep_serving" / "proxy" / "__init__.py")

    def test_entry_points(self, archives: dict[str, Path]) -> None:
        wheel = zipfile.ZipFile(archives["wheel"])
        (name,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
        text = wheel.read(name).decode()
        assert "uccl-ep = uccl_ep_serving.cli.main:app" in text
        assert "[sglang.srt.plugins]\nuccl_ep = uccl_ep_serving.engines.sglang:register" in text


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_a_release_with_this_python(release: ModuleType, tmp_path: Path) -> None:
    """All of ``make release`` with one Python: what it builds with and installs comes from the package index."""
    (tmp_path / "tmp").mkdir()
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    ran = run_bounded(
        [sys.executable, ROOT / "scripts/release.py", "--dirty", "--python", version, "--out", tmp_path / "dist"],
        seconds=2900,
        cwd=tmp_path,
        environment={**os.environ, "TMPDIR": str(tmp_path / "tmp")},
    )
    assert ran.returncode == 0, ran.stdout
    assert re.search(rf"^Python {version}\.\d+ +installed in .* two ranks in \d+ s$", ran.stdout, re.MULTILINE)
    names = [f"{release.STEM}-py3-none-any.whl", f"{release.STEM}.tar.gz"]
    assert sorted(path.name for path in (tmp_path / "dist").iterdir()) == names
    for name in names:
        assert hashlib.sha256((tmp_path / "dist" / name).read_bytes()).hexdigest() in ran.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dist", "tmp"]
    assert list((tmp_path / "tmp").iterdir()) == []
