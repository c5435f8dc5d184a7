"""Reading what installed engines do with DeepEP's ``Buffer``, on top of what the plugin reads at a launch."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

from uccl_ep_serving.engines.deepep_calls import Use, fits, keywords_of, uses

__all__ = ["Use", "engine_file", "fits", "made_from", "uses"]


def engine_file(engine: str, path: str) -> Path:
    """A file of an installed package, without importing it."""
    spec = importlib.util.find_spec(engine)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / path


def made_from(source: str, classes: tuple[str, ...], function: str) -> list[Use]:
    """The constructions whose keywords the dictionaries ``kwargs`` of ``function`` in ``classes`` hold."""
    return [
        Use("__init__", node.lineno, 0, frozenset(keywords_of(ast.Name("kwargs"), node)), False)
        for part in ast.parse(source).body
        if isinstance(part, ast.ClassDef) and part.name.startswith(classes)
        for node in part.body
        if isinstance(node, ast.FunctionDef) and node.name == function
    ]
