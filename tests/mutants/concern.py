"""Which tests concern a file: those that import it, the nearest first.

Coverage cannot say it, because compiled code and the processes of ranks are not traced. So it follows from the imports
of the product, of the tests and of what tests share, and from the rooms: ``tests/`` mirrors the source tree. Who names
a module in a string, or a file beside itself, starts it, and counts as importing it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePosixPath

__all__ = ["Imports", "module_of"]

#: Folders of the product whose tests stand in a room of another name.
_ROOMS = {"proxy/transport/nic": "rdma", "proxy/transport/verbs": "rdma"}
#: Files of the root whose tests have a room.
_FILES = {"buffer.py": "system"}
#: Tests that judge the source itself, or run mutants of their own.
_NOT = ("tests/project/", "tests/mutants/", "tests/benchmarks/", "tests/rules/test_markers", "tests/rules/test_rule_t")


def module_of(file: str, package: str = "uccl_ep_serving") -> str:
    """Dotted name of a file of the tree."""
    path = PurePosixPath(file).with_suffix("")
    parts = path.parts if path.parts[0] in (package, "tests", "benchmarks") else (package, *path.parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


class Imports:
    """What imports what among the Python files of a tree.

    Args:
        sources: text by path from the root of the tree, without what symlinks show a second time.
        package: of the product; files outside of it and of the tests install inside of it.
    """

    def __init__(self, sources: Mapping[str, str], package: str = "uccl_ep_serving") -> None:
        self._package = package
        self._files = {module_of(file, package): file for file in sources}
        self._imported = {
            module: {name for name in self._names(module, sources[file]) if name != module}
            for module, file in self._files.items()
        }

    def _names(self, module: str, source: str) -> Iterator[str]:
        """Modules of the tree that ``module`` imports."""
        is_package = self._files[module].endswith("__init__.py")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names if alias.name in self._files)
            elif isinstance(node, ast.ImportFrom):
                above = module.split(".")[: len(module.split(".")) - node.level + is_package] if node.level else []
                base = ".".join([*above, *filter(None, [node.module])])
                for alias in node.names:
                    inner = f"{base}.{alias.name}"
                    if (name := inner if inner in self._files else base) in self._files:
                        yield name
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                beside = module.rpartition(".")[0]
                for word in node.value.replace(":", " ").split():
                    names = (word, f"{beside}.{word.removesuffix('.py')}" if word.endswith(".py") else "")
                    yield from (name for name in names if name in self._files)

    def reached(self, modules: Iterable[str]) -> set[str]:
        """``modules`` and all that they import, directly or not."""
        seen: set[str] = set()
        left = list(modules)
        while left:
            if (module := left.pop()) not in seen:
                seen.add(module)
                left.extend(self._imported.get(module, ()))
        return seen

    def tests_of(self, file: str) -> list[str]:
        """Files of tests that concern ``file``, the nearest first: by imports on the way, one less for tests in its
        room, one less for those that have the name of its folder in theirs, one less for each word of its own name
        that stands in theirs, at most two."""
        away = {module_of(file, self._package): 0}
        frontier = list(away)
        while frontier:
            importers = [name for name, imported in self._imported.items() if imported & set(frontier)]
            step = away[frontier[0]] + 1
            frontier = [name for name in importers if name not in away]
            away |= dict.fromkeys(frontier, step)
        # whatever else its room holds: what is imported by a name that is put together cannot be seen
        apart = max(away.values()) + 1
        room, stem, folder = self._room(file), PurePosixPath(file).stem.strip("_"), PurePosixPath(file).parent.name
        ranked = []
        for name, test in self._files.items():
            path = PurePosixPath(test)
            distance = away.get(name, apart if str(path.parent) == room else None)
            if path.name.startswith("test_") and not test.startswith(_NOT) and distance is not None:
                shared = 2 if stem in path.stem else len(set(stem.split("_")) & set(path.stem.split("_")))
                near = (str(path.parent) == room) + (f"_{folder}_" in path.stem) + min(shared, 2)
                ranked.append((distance - near, test))
        return [test for _, test in sorted(ranked)]

    def _room(self, file: str) -> str:
        within = file.removeprefix(f"{self._package}/")
        parent = PurePosixPath(within).parent
        if within in _FILES:
            return f"tests/{_FILES[within]}"
        for folder, room in _ROOMS.items():
            if str(parent) == folder:
                return f"tests/{room}"
        return f"tests/{parent.parts[0]}" if parent.parts else "tests"
