#!/usr/bin/env python3
"""Build the sdist and the wheel of this version, check them, and try the wheel as users will: ``make release``.

    make release                         with every Python of 3.11, 3.12 and 3.13 that this machine has
    make release ARGS="--python 3.12"    with this one
    make release ARGS=--dirty            of a checkout with changes that are not committed: a trial

The wheel is built from the sdist, and both are compared with the source tree, file by file. For each Python (on PATH,
of pyenv, of uv) the wheel is installed into a fresh environment, with the versions that requirements/ pins. There, away
from the checkout, `uccl-ep --version` runs, and the ten lines of README.md on two CPU ranks. A Python that is not here
is named. Both files come to dist/ when everything has passed. On failure dist/ stays as it is and the status is 1.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support import ten_lines
from tests.support.bounded import run_bounded
from tests.support.source_tree import PYPROJECT, ROOT, copy_source, installed_files

PYTHONS = ("3.11", "3.12", "3.13")
#: Bytes that each file may have: the package takes 0.7 MB, the demo's model 1.7 MB.
MOST_BYTES = 3_000_000
NAME, VERSION = PYPROJECT["project"]["name"], PYPROJECT["project"]["version"]
STEM = f"{NAME}-{VERSION}"
LISTS = ROOT / "requirements"
# seconds of each step at most; torch with its CUDA libraries is 3 GB to fetch
_QUICK, _BUILD, _LIST, _TORCH, _RANKS = 60.0, 300.0, 600.0, 1800.0, 300.0
#: What an sdist holds beside the package.
_BESIDE = {"CHANGELOG.md", "LICENSE", "README.md", "pyproject.toml"}
_MADE = {"MANIFEST.in", "PKG-INFO", "setup.cfg"}
_DIST_INFO = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt"}


class Failed(Exception):
    """A step of the release failed; the message says which, why, and where needed what to do."""


@dataclass(frozen=True)
class Outcome:
    """What became of one Python: the line of the table, and whether it is a failure."""

    python: str
    text: str
    failed: bool = False


def environment(place: Path) -> dict[str, str]:
    """The variables of every step: without those that lead back to this environment, all leavings in ``place``."""
    (place / "tmp").mkdir(exist_ok=True)
    ours = ("PYTHON", "UCCL_EP_", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return {**kept, "TMPDIR": str(place / "tmp"), "UCCL_EP_CACHE_DIR": str(place / "cache")}


def run(what: str, command: Sequence[str | Path], *, seconds: float, cwd: Path, variables: Mapping[str, str]) -> str:
    """What ``command`` printed. Raises :class:`Failed`, with the last of it, when it fails or takes longer."""
    try:
        ran = run_bounded(command, seconds=seconds, cwd=cwd, environment=variables)
    except subprocess.TimeoutExpired as error:
        raise Failed(f"{what} took more than {seconds:g} s; its last lines:\n{_tail(error.output)}") from None
    except OSError as error:
        raise Failed(f"{what} could not be started: {error}") from None
    if ran.returncode != 0:
        raise Failed(f"{what} ended with status {ran.returncode}; its last lines:\n{_tail(ran.stdout)}")
    return ran.stdout


def _tail(output: str | None) -> str:
    return "\n".join(f"    {line}" for line in (output or "").splitlines()[-20:])


def install(python: Path, *arguments: str | Path, seconds: float, variables: Mapping[str, str]) -> None:
    """``pip install`` with ``arguments`` into the environment of ``python``."""
    options = ["-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--quiet", *arguments]
    names = " ".join(argument.name if isinstance(argument, Path) else argument for argument in arguments)
    run(f"pip install {names}", [python, *options], seconds=seconds, cwd=python.parents[2], variables=variables)


def make_environment(python: str | Path, place: Path, variables: Mapping[str, str]) -> Path:
    """A fresh environment in ``place``: the path of its Python."""
    command = [python, "-m", "venv", place]
    run(f"{python} -m venv", command, seconds=_BUILD, cwd=place.parent, variables=variables)
    return place / "bin" / "python"


def require_commit(dirty: bool) -> str:
    """What the release is made of, in words. Raises :class:`Failed` when that is no commit, unless ``dirty``."""

    def git(*words: str) -> str:
        return run(f"git {words[0]}", ["git", *words], seconds=_QUICK, cwd=ROOT, variables=os.environ).strip()

    commit, changed = git("rev-parse", "--short=12", "HEAD"), git("status", "--porcelain").splitlines()
    if not changed:
        return f"commit {commit}"
    if not dirty:
        raise Failed(
            f"{len(changed)} files differ from commit {commit}, the first is {changed[0].split(maxsplit=1)[1]}: commit "
            "or remove them. To only try: make release ARGS=--dirty"
        )
    return f"commit {commit} and {len(changed)} files that differ from it"


def require_notes(changelog: str) -> None:
    """Raises :class:`Failed` unless ``changelog`` has dated notes of this version."""
    heading = rf"^## \[{re.escape(VERSION)}\] - \d{{4}}-\d\d-\d\d$"
    _, *after = re.split(heading, changelog, maxsplit=1, flags=re.MULTILINE)
    if not after or not re.split(r"^## ", after[0], maxsplit=1, flags=re.MULTILINE)[0].strip():
        raise Failed(
            f"CHANGELOG.md has no notes under a heading '## [{VERSION}] - YYYY-MM-DD': write them, or mend the "
            "version in pyproject.toml"
        )


def build(python: Path, source: Path, to: Path, variables: Mapping[str, str]) -> tuple[Path, Path]:
    """Build the sdist of ``source`` and, from that, the wheel, with the setuptools of ``python``'s environment."""
    command: list[str | Path] = [python, "-m", "build", "--no-isolation", "--outdir", to, source]
    run("python -m build", command, seconds=_BUILD, cwd=source, variables=variables)
    sdist, wheel = to / f"{STEM}.tar.gz", to / f"{STEM}-py3-none-any.whl"
    if {path.name for path in to.iterdir()} != {sdist.name, wheel.name}:
        built = ", ".join(sorted(path.name for path in to.iterdir()))
        raise Failed(f"python -m build made {built}; expected were {sdist.name} and {wheel.name}")
    return sdist, wheel


def compare(held: Mapping[str, bytes], wanted: Mapping[str, Path], made: Iterable[str]) -> list[str]:
    """How the files ``held`` by an archive differ from ``wanted``, of the source tree, and ``made``, by the build."""
    extra = held.keys() - wanted.keys() - set(made)
    differ = [name for name in wanted.keys() & held.keys() if held[name] != wanted[name].read_bytes()]
    return [
        *(f"{name} is missing" for name in sorted((wanted.keys() | set(made)) - held.keys())),
        *(f"{name} does not belong there" for name in sorted(extra)),
        *(f"{name} is not that of the source tree" for name in sorted(differ)),
    ]


def wheel_faults(wheel: Path) -> list[str]:
    """What is wrong with the contents of ``wheel``: it holds the package and its metadata, nothing else."""
    with zipfile.ZipFile(wheel) as archive:
        links = [info.filename for info in archive.infolist() if stat.S_ISLNK(info.external_attr >> 16)]
        held = {name: archive.read(name) for name in archive.namelist()}
    made = {f"{STEM}.dist-info/{name}" for name in _DIST_INFO}
    return [*(f"{name} is a symlink" for name in links), *compare(held, installed_files(), made)]


def sdist_faults(sdist: Path) -> list[str]:
    """What is wrong with the contents of ``sdist``: it holds what the wheel is built from, nothing else."""
    odd, held = [], {}
    with tarfile.open(sdist) as archive:
        for member in archive:
            top, _, name = member.name.partition("/")
            file = archive.extractfile(member) if member.isfile() else None
            if top != STEM or not (file or member.isdir()):
                odd.append(f"{member.name} is outside {STEM}/, or neither a file nor a directory")
            elif file and not name.startswith(f"{NAME}.egg-info/"):
                held[name] = file.read()
    wanted = [*installed_files().values(), *(ROOT / name for name in _BESIDE)]
    return [*odd, *compare(held, {path.relative_to(ROOT).as_posix(): path for path in wanted}, _MADE)]


def require_contents(sdist: Path, wheel: Path) -> None:
    """Raises :class:`Failed` with what is wrong with the contents or the size of the files."""
    faults = []
    for path, found in ((sdist, sdist_faults(sdist)), (wheel, wheel_faults(wheel))):
        faults += [f"{path.name}: {fault}" for fault in found]
        if (size := path.stat().st_size) > MOST_BYTES:
            faults.append(f"{path.name} has {size:,} bytes, at most {MOST_BYTES:,} are allowed (MOST_BYTES)")
    if faults:
        more = [f"and {len(faults) - 20} more"] if len(faults) > 20 else []
        raise Failed("\n    ".join(["the files do not hold what they should:", *faults[:20], *more]))


def candidates(version: str) -> Iterator[Path]:
    """Where a Python of ``version`` may be: on PATH, of pyenv, of uv."""
    name = f"python{version}"
    for directory in filter(None, os.environ.get("PATH", "").split(os.pathsep)):
        yield Path(directory) / name
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    yield from sorted(pyenv.glob(f"versions/{version}.*/bin/{name}"))
    data = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share")
    uv = Path(os.environ.get("UV_PYTHON_INSTALL_DIR") or data / "uv/python")
    yield from sorted(uv.glob(f"cpython-{version}.*/bin/{name}"))


def find_python(version: str) -> tuple[Path | None, str]:
    """The first Python of ``version`` that makes environments, and its full version; or None, and why there is none."""
    refused = []
    code = "import sys, venv, ensurepip; print('%d.%d.%d' % sys.version_info[:3])"
    for path in dict.fromkeys(candidates(version)):
        if not path.is_file():
            continue
        try:
            found = run(str(path), [path, "-c", code], seconds=_QUICK, cwd=ROOT, variables=os.environ).split()
        except Failed as error:
            reason = str(error).splitlines()[-1].strip()
            refused.append(f"{path} does not start, or lacks venv or ensurepip ({reason})")
            continue
        if found and found[-1].startswith(f"{version}."):
            return path, found[-1]
    return None, "; ".join(refused) or f"no python{version} on PATH, of pyenv or of uv"


def try_wheel(python: Path, wheel: Path, place: Path, variables: Mapping[str, str]) -> str:
    """Install ``wheel`` in a fresh environment of ``python`` below ``place`` and use it: seconds of both, in words."""
    begun = time.monotonic()
    away = place / "elsewhere"
    away.mkdir(parents=True)
    inside = make_environment(python, place / "venv", variables)
    # as scripts/install does: torch brings libraries of its own, and no resolver decides about the others
    pinned: list[str | Path] = ["-r", LISTS / "torch.txt", "-c", LISTS / "core.txt"]
    install(inside, *pinned, seconds=_TORCH, variables=variables)
    install(inside, "--no-deps", "-r", LISTS / "core.txt", seconds=_LIST, variables=variables)
    install(inside, "--no-deps", wheel, seconds=_QUICK, variables=variables)
    run("pip check", [inside, "-m", "pip", "check"], seconds=_QUICK, cwd=away, variables=variables)
    installed = time.monotonic()
    command = inside.with_name("uccl-ep")
    said = run("uccl-ep --version", [command, "--version"], seconds=_QUICK, cwd=away, variables=variables).strip()
    if said != f"{NAME} {VERSION}":
        raise Failed(f"uccl-ep --version says {said!r}, expected is '{NAME} {VERSION}'")
    what = "the ten lines of README.md on two ranks"
    output = run(what, ten_lines.command(inside, away), seconds=_RANKS, cwd=away, variables=variables)
    if not ten_lines.is_checked(output):
        raise Failed(f"{what} ended without both ranks' word that they are right:\n{_tail(output)}")
    ran = time.monotonic()
    return f"installed in {installed - begun:.0f} s, {said}, ten lines on two ranks in {ran - installed:.0f} s"


def try_pythons(versions: Sequence[str], wheel: Path, place: Path, variables: Mapping[str, str]) -> list[Outcome]:
    """What became of each Python, one after another; the details of failures go to stderr."""
    outcomes = []
    for version in versions:
        path, full = find_python(version)
        if path is None:
            outcomes.append(Outcome(version, f"SKIPPED: {full}"))
            continue
        print(f"release: Python {full}, {path}", flush=True)
        there = place / f"python{version}"
        try:
            outcomes.append(Outcome(full, try_wheel(path, wheel, there, variables)))
        except Failed as error:
            print(f"release: Python {full}: {error}", file=sys.stderr)
            outcomes.append(Outcome(full, f"FAILED: {str(error).splitlines()[0]}", failed=True))
        finally:
            shutil.rmtree(there, ignore_errors=True)  # some GB each
    return outcomes


def table(of: str, files: Sequence[Path], outcomes: Sequence[Outcome]) -> str:
    """The end of a release: what it is made of, what became of each Python, bytes and digests of the files."""
    width = max(len(path.name) for path in files)
    lines = [f"{NAME} {VERSION}, {of}", ""]
    lines += [f"Python {one.python:8} {one.text}" for one in outcomes]
    lines += ["", f"{'file':{width}}  {'bytes':>9}  sha256   (at most {MOST_BYTES:,} bytes each)"]
    for path in files:
        content = path.read_bytes()
        lines.append(f"{path.name:{width}}  {len(content):9,}  {hashlib.sha256(content).hexdigest()}")
    return "\n".join(lines)


def release(place: Path, versions: Sequence[str], to: Path, dirty: bool) -> None:
    """Everything, in ``place``, up to the files in ``to``. Raises :class:`Failed`."""
    of = require_commit(dirty)
    require_notes((ROOT / "CHANGELOG.md").read_text())
    variables = environment(place)
    source, built = place / "source", place / "built"
    built.mkdir()
    copy_source(source)
    print(f"release: building {NAME} {VERSION} of {of}", flush=True)
    # the pinned setuptools in an environment of nothing else: what isolation is for, and the same on every machine
    tools = make_environment(sys.executable, place / "tools", variables)
    for name in ("core.txt", "release.txt"):
        install(tools, "--no-deps", "-r", LISTS / name, seconds=_LIST, variables=variables)
    files = build(tools, source, built, variables)
    check: list[str | Path] = [tools, "-m", "twine", "check", "--strict", *files]
    run("twine check --strict", check, seconds=_QUICK, cwd=place, variables=variables)
    require_contents(*files)
    outcomes = try_pythons(versions, files[1], place, variables)
    print(table(of, files, outcomes), flush=True)
    failed = [one.python for one in outcomes if one.failed]
    if failed:
        raise Failed(f"nothing is written to {to}: failed with Python {', '.join(failed)}, see above")
    if all(one.text.startswith("SKIPPED") for one in outcomes):
        raise Failed(f"nothing is written to {to}: no Python of {', '.join(versions)} is here to try the wheel with")
    to.mkdir(parents=True, exist_ok=True)
    for path in files:
        shutil.copyfile(path, to / path.name)
    print(f"release: both are in {to}")


def main(arguments: Sequence[str]) -> int:
    """Run what ``arguments`` ask for; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", action="append", choices=PYTHONS, help="try with this one only; may be repeated")
    parser.add_argument("--dirty", action="store_true", help="also of a checkout with changes that are not committed")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="directory of both files (default: dist)")
    options = parser.parse_args(arguments)
    # so that being stopped leaves nothing behind either
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with tempfile.TemporaryDirectory(prefix="uccl-ep-release-") as place:
            release(Path(place), options.python or PYTHONS, options.out.absolute(), options.dirty)
    except Failed as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
