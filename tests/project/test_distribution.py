"""The wheel and the sdist hold the whole package, under its installed names, and work anywhere."""

from __future__ import annotations

import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.support.source_tree import PYPROJECT, ROOT, python_sources, run_python, source_files


@pytest.mark.long
class TestDistribution:
    @pytest.fixture(scope="class")
    @staticmethod
    def archives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
        """The wheel built from the checkout, the sdist, and the wheel built from that sdist."""
        place = tmp_path_factory.mktemp("dist")
        source = place / "source"
        for path in source_files():
            copy = source / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
        for name in ("kernels", "proxy"):
            (source / "uccl_ep_serving" / name).symlink_to(f"../{name}")

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

    @staticmethod
    def expected() -> set[str]:
        names = set()
        for path in python_sources():
            relative = str(path.relative_to(ROOT))
            names.add(relative if relative.startswith("uccl_ep_serving/") else f"uccl_ep_serving/{relative}")
        return names

    @pytest.mark.parametrize("which", ["wheel", "again"])
    def test_wheel_contents(self, archives: dict[str, Path], which: str) -> None:
        names = set(zipfile.ZipFile(archives[which]).namelist())
        package = {name for name in names if name.endswith(".py")}
        assert package == self.expected()
        assert "uccl_ep_serving/py.typed" in names
        assert not [name for name in names if name.endswith(".md")]
        assert {name.partition("/")[0] for name in names} == {
            "uccl_ep_serving",
            f"uccl_ep_serving-{PYPROJECT['project']['version']}.dist-info",
        }

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
