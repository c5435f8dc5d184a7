"""The compiled code of a tree with a mutant: what the mutant cannot reach is taken over from the tree without it.

The cache of compiled code is keyed by a digest of all sources, so a mutant would have everything compiled again. Here a
group of entry points whose modules do not import the mutated file, directly or not, is copied to the new digest.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.mutants.concern import Imports, module_of

__all__ = ["Cache"]

#: Prints the digest of the sources, and by file name of each group of the package the modules of its entry points.
_LOOK = """
import contextlib, importlib, json, pkgutil, sys
import uccl_ep_serving
from uccl_ep_serving.native.cache import _source_digest
from uccl_ep_serving.native.groups import Group
from uccl_ep_serving.native.parts import Function

found = {}
if sys.argv[1:]:
    for part in ("native", "kernels", "proxy"):
        package = importlib.import_module("uccl_ep_serving." + part)
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            if ".triton" in module.name:
                continue
            for one in list(vars(importlib.import_module(module.name)).values()):
                if not isinstance(one, Group | Function):
                    continue
                # a function that Python calls by itself is a group of its own; not every one can be called
                group = one if isinstance(one, Group) else Group(one.name, one)
                with contextlib.suppress(TypeError):
                    found[group._file_name] = sorted({one.function.__module__ for one in group._entries.values()})
print(json.dumps([_source_digest(), found]))
"""


class Cache:
    """Of a tree.

    Args:
        place: value of UCCL_EP_CACHE_DIR.
        python: interpreter.
        environment: in which it finds the tree's package.
        imports: of the tree.
        warm: directory with compiled code of the same sources, where there is one.
    """

    def __init__(
        self, place: Path, python: str, environment: Mapping[str, str], imports: Imports, warm: Path | None
    ) -> None:
        self._base = place / "uccl_ep_serving"
        self._python, self._environment, self._imports = python, environment, imports
        digest, self._modules = self._look("all")
        if not digest:
            raise RuntimeError(f"the tree without a mutant cannot be imported: {self._modules['why']}")
        self.clean = self._base / digest
        if warm is not None and (warm / digest).is_dir():
            shutil.copytree(warm / digest, self.clean, ignore=shutil.ignore_patterns("*.lock"))

    def _look(self, *what: str) -> tuple[str, dict[str, list[str]]]:
        done = subprocess.run(
            [self._python, "-P", "-c", _LOOK, *what],
            env={**os.environ, **self._environment},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        if done.returncode:
            return "", {"why": done.stderr.splitlines()[-1:]}
        digest, found = json.loads(done.stdout)
        return digest, found

    def take_over(self, file: str) -> int:
        """Copy what ``file``, which has just been changed, cannot reach; how many groups. A package that cannot be
        imported any more needs none."""
        digest, _ = self._look()
        changed = self._base / digest
        if not digest or changed == self.clean or not self.clean.is_dir():
            return 0
        changed.mkdir(parents=True, exist_ok=True)
        copied = 0
        for name, modules in self._modules.items():
            if (self.clean / name).exists() and module_of(file) not in self._imports.reached(modules):
                shutil.copy(self.clean / name, changed / name)
                copied += 1
        return copied

    def drop_others(self) -> None:
        """Remove the compiled code of mutants."""
        for directory in self._base.iterdir() if self._base.is_dir() else ():
            if directory != self.clean:
                shutil.rmtree(directory, ignore_errors=True)
