"""Modules of the product executed a second time, from changed sources, beside those that everybody else uses."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

from tests.rules.mutation import ROOT

__all__ = ["execute"]


def execute(names: Sequence[str], sources: Mapping[Path, str], directory: Path | None = None) -> dict[str, ModuleType]:
    """By name, new modules: each sees those before it in place of the product's.

    Args:
        names: modules of the product, in the order in which they import each other.
        sources: what stands in place of their own, by path from the root of the checkout.
        directory: where they are written, for a compiler that reads the source of a function from its file.
    """
    kept = {name: importlib.import_module(name) for name in names}
    paths = {name: Path(str(module.__file__)).resolve().relative_to(ROOT) for name, module in kept.items()}
    assert sources.keys() <= set(paths.values()), f"rules outside the family: {sources.keys() - set(paths.values())}"
    family: dict[str, ModuleType] = {}
    try:
        for name in names:
            family[name] = fresh = ModuleType(name)
            fresh.__package__ = name.rpartition(".")[0]
            _enter(name, fresh)
            source = sources.get(paths[name]) or (ROOT / paths[name]).read_text()
            file = f"<mutant of {paths[name].name}>"
            if directory is not None:
                file = str(directory / paths[name].name)
                Path(file).write_text(source)
            exec(compile(source, file, "exec"), fresh.__dict__)
    finally:
        for name, module in kept.items():
            _enter(name, module)
    return family


def _enter(name: str, module: ModuleType) -> None:
    package, _, short = name.rpartition(".")
    sys.modules[name] = module
    setattr(sys.modules[package], short, module)
