"""One-line mutants of a source text, from its syntax tree, in an order that a seed fixes.

Nothing is changed in docstrings, messages, log calls, annotations, decorators and ``__all__``: who would test them. The
order follows from the texts of the lines, not from their numbers: an edit of the product elsewhere does not change what
a seed draws.
"""

from __future__ import annotations

import ast
import hashlib
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

__all__ = ["Mutant", "applied", "drawn", "mutants"]

_COMPARED: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
_COMPUTED: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
}
#: Calls in which the order of arguments says nothing.
_ORDERLESS = frozenset(("suppress", "minimum", "maximum", "gcd", "logical_and", "logical_or"))
_LOGGED = frozenset(("_log", "log", "logger", "logging", "warnings", "print", "_say"))


class Mutant(NamedTuple):
    """A line of a file, without its indentation, before and after.

    ``occurrence`` counts equal lines of the file, from 0.
    """

    file: str
    line: int
    occurrence: int
    kind: str
    before: str
    after: str

    @property
    def id(self) -> str:
        """The same wherever the line stands in its file."""
        return _digest(self.file, self.before, self.after, self.occurrence)[:10]


class _Edit(NamedTuple):
    kind: str
    line: int
    start: int
    end: int
    text: bytes


def mutants(file: str, source: str) -> list[Mutant]:
    """All mutants of ``source``, by line, some of which may not compile."""
    lines = source.encode().split(b"\n")
    met: Counter[str] = Counter()
    occurrences = []
    for line in lines:
        text = line.decode().strip()
        occurrences.append(met[text])
        met[text] += 1
    found = []
    for edit in sorted(_Edits(lines).of(ast.parse(source))):
        line = lines[edit.line - 1]
        after = line[: edit.start] + edit.text + line[edit.end :]
        before, changed = line.decode().strip(), after.decode().strip()
        if changed != before:
            found.append(Mutant(file, edit.line, occurrences[edit.line - 1], edit.kind, before, changed))
    return sorted(found, key=lambda mutant: mutant.line)


def applied(source: str, mutant: Mutant) -> str:
    """``source`` with the mutant in it. Raises ValueError when its line does not stand there any more."""
    lines = source.split("\n")
    line = lines[mutant.line - 1]
    if line.strip() != mutant.before:
        raise ValueError(f"{mutant.file}:{mutant.line} is not {mutant.before!r}")
    lines[mutant.line - 1] = line[: len(line) - len(line.lstrip())] + mutant.after
    return "\n".join(lines)


def drawn(seed: int, sources: Mapping[str, str]) -> Iterator[Mutant]:
    """A mutant of every line that has any, in the order of ``seed``; each compiles.

    Args:
        sources: text by file.
    """
    lines: dict[tuple[str, int], list[Mutant]] = {}
    for file, source in sources.items():
        for mutant in mutants(file, source):
            lines.setdefault((file, mutant.line), []).append(mutant)

    def place(several: list[Mutant]) -> str:
        return _digest(seed, several[0].file, several[0].before, several[0].occurrence)

    for several in sorted(lines.values(), key=place):
        in_order = sorted(several, key=lambda mutant: _digest(seed, mutant.id))
        compiled = (mutant for mutant in in_order if _compiles(applied(sources[mutant.file], mutant)))
        yield from itertools.islice(compiled, 1)


def _digest(*parts: object) -> str:
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()


def _compiles(source: str) -> bool:
    try:
        compile(source, "mutant", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return True


class _Edits:
    """What may be changed; columns are those of bytes, as in a syntax tree."""

    def __init__(self, lines: list[bytes]) -> None:
        self._lines = lines

    def of(self, tree: ast.AST) -> Iterator[_Edit]:
        """The edits of ``tree`` and all below it."""
        if not _is_left_alone(tree):
            yield from self._here(tree)
            for child in _children(tree):
                yield from self.of(child)

    def _here(self, node: ast.AST) -> Iterator[_Edit]:
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
            for left, operator, right in zip(operands, node.ops, operands[1:], strict=False):
                yield from self._operator("comparison", left, right, *_COMPARED[type(operator)])
        elif isinstance(node, ast.BinOp) and type(node.op) in _COMPUTED:
            yield from self._operator("operator", node.left, node.right, *_COMPUTED[type(node.op)])
        elif isinstance(node, ast.BoolOp):
            words = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            for left, right in zip(node.values, node.values[1:], strict=False):
                yield from self._operator("and / or", left, right, *words)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield from self._replaced("not dropped", node, self._text(node.operand))
        elif isinstance(node, ast.Constant):
            if isinstance(node.value, bool):
                yield from self._replaced("True / False", node, b"%r" % (not node.value))
            elif isinstance(node.value, int):
                for value in (node.value + 1, node.value - 1):
                    yield from self._replaced("constant", node, b"%d" % value)
        elif isinstance(node, ast.Call):
            yield from self._call(node)
        elif isinstance(node, ast.stmt) and _may_be_dropped(node):
            yield from self._replaced("statement dropped", node, b"pass")
        if isinstance(node, ast.If | ast.While | ast.IfExp | ast.Assert):
            test = node.test
            if not (isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)) and not _is_constant(test):
                yield from self._replaced("condition negated", test, b"not (" + self._text(test) + b")")

    def _call(self, node: ast.Call) -> Iterator[_Edit]:
        if isinstance(node.func, ast.Name) and node.func.id in ("min", "max"):
            other = b"max" if node.func.id == "min" else b"min"
            yield from self._replaced("min / max", node.func, other)
            return
        if ast.unparse(node.func).rpartition(".")[2] in _ORDERLESS:
            return
        for left, right in zip(node.args, node.args[1:], strict=False):
            one_line = left.lineno == right.end_lineno
            if one_line and not any(isinstance(one, ast.Starred) or _is_text(one) for one in (left, right)):
                line = self._lines[left.lineno - 1]
                between = line[left.end_col_offset : right.col_offset]
                swapped = self._text(right) + between + self._text(left)
                assert right.end_col_offset is not None
                yield _Edit("arguments swapped", left.lineno, left.col_offset, right.end_col_offset, swapped)

    def _operator(self, kind: str, left: ast.expr, right: ast.expr, old: str, new: str) -> Iterator[_Edit]:
        if left.end_lineno != right.lineno or _is_text(left) or _is_text(right):
            return
        assert left.end_col_offset is not None
        between = self._lines[right.lineno - 1][left.end_col_offset : right.col_offset]
        text = between.replace(old.encode(), new.encode(), 1)
        yield _Edit(kind, right.lineno, left.end_col_offset, right.col_offset, text)

    def _replaced(self, kind: str, node: ast.expr | ast.stmt, text: bytes) -> Iterator[_Edit]:
        if node.lineno == node.end_lineno and node.end_col_offset is not None:
            yield _Edit(kind, node.lineno, node.col_offset, node.end_col_offset, text)

    def _text(self, node: ast.expr) -> bytes:
        return self._lines[node.lineno - 1][node.col_offset : node.end_col_offset]


def _children(node: ast.AST) -> Iterable[ast.AST]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        defaults = [one for one in (*node.args.defaults, *node.args.kw_defaults) if one is not None]
        return [*defaults, *node.body]
    if isinstance(node, ast.ClassDef):
        return node.body
    if isinstance(node, ast.AnnAssign):
        return [node.value] if node.value is not None else []
    return ast.iter_child_nodes(node)


def _is_left_alone(node: ast.AST) -> bool:
    if isinstance(node, ast.JoinedStr | ast.Import | ast.ImportFrom):
        return True
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant) or _is_logged(node.value)
    if isinstance(node, ast.Assign):
        return any(isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets)
    if isinstance(node, ast.If):
        return ast.unparse(node.test).endswith(("TYPE_CHECKING", "__name__ == '__main__'"))
    # an exception is made of its message
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.endswith("Error")


def _is_logged(node: ast.expr) -> bool:
    while isinstance(node, ast.Call | ast.Attribute):
        node = node.func if isinstance(node, ast.Call) else node.value
    return isinstance(node, ast.Name) and node.id in _LOGGED


def _may_be_dropped(node: ast.stmt) -> bool:
    if isinstance(node, ast.Assign):
        return all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets)
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call)
    return isinstance(node, ast.AugAssign | ast.Break | ast.Continue | ast.Raise | ast.Delete)


def _is_constant(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
