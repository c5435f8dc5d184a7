"""What an engine's source does with DeepEP's ``Buffer``: every attribute and call, read from the syntax tree.

The plugin refuses by name what our Buffer does not take, before a scheduler starts. Nothing is imported of the engine,
so that its CUDA code is read on any machine. Keywords that travel in dictionaries
(``**(dict(use_nvfp4=True) if ... else dict())``, a dictionary built before the call) count as well.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Set
from typing import Any, NamedTuple

from uccl_ep_serving import buffer as facade
from uccl_ep_serving.buffer import Buffer

__all__ = ["Use", "fits", "keywords_of", "uses"]

#: How engines call what holds a Buffer.
HOLDERS = frozenset({"buffer", "buf", "_buffer", "handle"})
#: The class, as engines import it.
CLASSES = {"Buffer"}


class Use(NamedTuple):
    """One use of a Buffer.

    Attributes:
        name: of the attribute; ``__init__`` when the class is called.
        line: in the engine's file.
        positional: arguments by position, -1 for an attribute that is not called.
        keywords: arguments by name.
        on_class: True for ``Buffer.name``.
    """

    name: str
    line: int
    positional: int
    keywords: frozenset[str]
    on_class: bool


def keywords_of(node: ast.AST, function: ast.AST) -> Iterator[str]:
    """Names that a ``**node`` may bring, as far as ``function`` says."""
    for part in ast.walk(node):
        if isinstance(part, ast.Call) and isinstance(part.func, ast.Name) and part.func.id == "dict":
            yield from (one.arg for one in part.keywords if one.arg)
        elif isinstance(part, ast.Dict):
            yield from (str(key.value) for key in part.keys if isinstance(key, ast.Constant))
    if isinstance(node, ast.Name):
        for part in ast.walk(function):
            if not isinstance(part, ast.Assign):
                continue
            for target in part.targets:
                if isinstance(target, ast.Name) and target.id == node.id:
                    yield from keywords_of(part.value, ast.Module([], []))
                # kwargs["use_fabric"] = True
                slot = target.slice if isinstance(target, ast.Subscript) else None
                if (
                    isinstance(target, ast.Subscript)
                    and isinstance(target.value, ast.Name)
                    and target.value.id == node.id
                    and isinstance(slot, ast.Constant)
                ):
                    yield str(slot.value)


def _holder(node: ast.AST) -> str:
    """The last name of ``self.buffer``, ``deep_ep.Buffer``, ``buffer``."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def uses(source: str, classes: tuple[str, ...] = (), holders: Set[str] = HOLDERS) -> list[Use]:
    """Every use of a Buffer in ``source``, by line.

    Args:
        classes: beginnings of the names of the classes to read; by default the whole source.
        holders: how the engine calls what holds a Buffer, or another of our objects.
    """
    tree = ast.parse(source)
    parts = [
        node for node in tree.body if not classes or (isinstance(node, ast.ClassDef) and node.name.startswith(classes))
    ]
    found: list[Use] = []
    for function in (node for part in parts for node in ast.walk(part) if isinstance(node, ast.FunctionDef)):
        calls = {id(node.func): node for node in ast.walk(function) if isinstance(node, ast.Call)}
        for node in ast.walk(function):
            call = calls.get(id(node))
            positional, keywords = -1, frozenset[str]()
            if call is not None:
                positional = len(call.args)
                named = {one.arg for one in call.keywords if one.arg}
                spread = (name for one in call.keywords if not one.arg for name in keywords_of(one.value, function))
                keywords = frozenset(named | set(spread))
            if isinstance(node, ast.Attribute) and _holder(node.value) in holders | CLASSES:
                on_class = _holder(node.value) in CLASSES
                found.append(Use(node.attr, node.lineno, positional, keywords, on_class))
            elif call is not None and _holder(node) in CLASSES:
                found.append(Use("__init__", call.lineno, positional, keywords, False))
    return sorted(found, key=lambda use: use.line)


def _made_in_init() -> set[str]:
    """Attributes that ``Buffer.__init__`` gives to a Buffer."""
    tree = ast.parse(inspect.getsource(facade))
    return {
        node.attr
        for part in ast.walk(tree)
        if isinstance(part, ast.FunctionDef) and part.name == "__init__"
        for node in ast.walk(part)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }


def fits(use: Use, ours: type[Any] = Buffer) -> str:
    """What is wrong with ``use`` on our Buffer, or on another of our classes; empty when nothing is."""
    where = f"line {use.line}: {use.name}"
    if not hasattr(ours, use.name):
        made = ours is Buffer and use.positional < 0 and use.name in _made_in_init()
        return "" if made else f"{where} is missing"
    if use.positional < 0:
        return ""
    bound_to_instance = inspect.isfunction(inspect.getattr_static(ours, use.name))
    arguments = [None] * (use.positional + (bound_to_instance and not use.on_class))
    try:
        inspect.signature(getattr(ours, use.name)).bind(*arguments, **dict.fromkeys(use.keywords))
    except TypeError as error:
        return f"{where}: {error}"
    return ""
