"""Takes rules out of the source: finds each by its marker, and edits the statement below it.

A comment line ``# rule: NAME`` stands directly above the statement that holds the rule. A mutant says in which way the
rule goes (:data:`NEVER`, :func:`INSTEAD`, ...) and neither names a file nor quotes the source. An edit only puts text
around what is there, with a switch, so that one compiled copy serves all rules, two of one statement too.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

ROOT = Path(__file__).resolve().parents[2]
#: The directories of the source. (The package links to the other two; those links are not followed.)
SOURCE = ("kernels", "proxy", "uccl_ep_serving")
_MARKER = re.compile(r"^ *# rule: (.+)$", re.MULTILINE)
#: The name under which a mutated module finds ``peek``, whatever its own imports are.
_PEEK = "_peek_at_switch"


class _Switch(NamedTuple):
    """How the code around a statement says "the switch is thrown", ``and`` and ``or``."""

    removed: str
    conjunction: str = "and"
    disjunction: str = "or"


class _Edit(NamedTuple):
    node: ast.expr | ast.stmt
    before: str
    after: str


class Way(NamedTuple):
    """How a rule is taken out.

    ``around(switch, indent)`` is what to put before and after the condition or value of the statement, or the
    ``part``-th operand of that; of the statement itself where ``whole``.
    """

    around: Callable[[_Switch, str], tuple[str, str]]
    whole: bool = False
    part: int | None = None

    def of(self, part: int) -> Way:
        """The same for one operand of an ``and``, an ``or``, or a chain of ``&`` or ``|``."""
        return self._replace(part=part)


#: The condition is false.
NEVER = Way(lambda switch, _: ("((", f") {switch.conjunction} (not {switch.removed}))"))
#: The condition is true, and what it would have done is not done.
ALWAYS = Way(lambda switch, _: (f"({switch.removed} {switch.disjunction} (", "))"))
#: The statement, a simple one, is not executed.
SKIP = Way(lambda switch, _: (f"if not {switch.removed}: ", ""), whole=True)


def INSTEAD(value: str) -> Way:
    """``value`` takes the place of the value."""
    return Way(lambda switch, _: (f"(({value}) if {switch.removed} else (", "))"))


def BEFORE(code: str) -> Way:
    """``code`` is executed before the statement."""
    return Way(lambda switch, indent: (f"if {switch.removed}: {code}\n{indent}", ""), whole=True)


def AFTER(code: str) -> Way:
    """``code`` is executed after the statement."""
    return Way(lambda switch, indent: ("", f"\n{indent}if {switch.removed}: {code}"), whole=True)


class Mutant(NamedTuple):
    """The way to take a rule out, and the test that must fail then."""

    way: Way
    test: str


_Held = TypeVar("_Held")


class Rules(dict[str, _Held]):
    """A table of rules by name, which are marked in ``places``: two implementations may hold rules of one name."""

    def __init__(self, places: tuple[str, ...], rules: Mapping[str, _Held]) -> None:
        super().__init__(rules)
        self.places = places


def markers(places: Iterable[str] = SOURCE) -> list[tuple[str, Path]]:
    """(rule, path from ROOT) of every marker in ``places``."""
    paths = [path for place in places for path in sorted((ROOT / place).rglob("*.py"))]
    return [(rule, path.relative_to(ROOT)) for path in paths for rule in _MARKER.findall(path.read_text())]


def find(rules: Rules[Any]) -> dict[str, Path]:
    """The file of each rule. Raises AssertionError when one is not marked exactly once."""
    marked = markers(rules.places)
    found = {}
    for rule in rules:
        paths = [path for name, path in marked if name == rule]
        assert len(paths) == 1, f"'# rule: {rule}' stands {len(paths)} times in {', '.join(rules.places)}: {paths}"
        found[rule] = paths[0]
    return found


def held(source: str, rule: str) -> tuple[ast.stmt, ast.FunctionDef]:
    """The statement below the marker of ``rule``, and the innermost function around it."""
    lines = source.split("\n")
    at = next(number for number, line in enumerate(lines) if line.strip() == f"# rule: {rule}")
    while lines[at].lstrip().startswith("#"):
        at += 1
    statements = _statements(source)
    below = [node for node in statements if node.lineno == at + 1]
    assert below, f"no statement begins below '# rule: {rule}'"
    functions = [node for node in statements if isinstance(node, ast.FunctionDef)]
    around = [node for node in functions if node.lineno <= at < (node.end_lineno or 0)]
    assert around, f"'# rule: {rule}' stands in no function"
    return below[0], max(around, key=lambda node: node.lineno)


@functools.cache
def _statements(source: str) -> list[ast.stmt]:
    """All of ``source``, which holds many rules."""
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)]


def _value(node: ast.stmt, part: int | None) -> ast.expr:
    value = node.test if isinstance(node, ast.If | ast.While) else getattr(node, "value", None)
    assert isinstance(value, ast.expr), f"line {node.lineno}: a statement without condition or value"
    return value if part is None else _operands(value)[part]


def _operands(value: ast.expr) -> list[ast.expr]:
    """Of ``a and b and c``, and of ``a & b & c``, which leans to the left."""
    if isinstance(value, ast.BoolOp):
        return value.values
    assert isinstance(value, ast.BinOp), f"line {value.lineno}: no operands"
    chained = isinstance(value.left, ast.BinOp) and type(value.left.op) is type(value.op)
    return [*(_operands(value.left) if chained else [value.left]), value.right]


def _switch(path: Path, function: ast.FunctionDef, address: int, number: int) -> _Switch:
    if _is_compiled(path, function):
        return _Switch(f"({_PEEK}({address}) == {number})")
    removed = f"(__import__('ctypes').c_int64.from_address({address}).value == {number})"
    # in a kernel for a device, which runs in Triton's interpreter, `and` is no operation on tensors
    return _Switch(removed, "&", "|") if path.parts[:2] == ("kernels", "triton") else _Switch(removed)


def _is_compiled(path: Path, function: ast.FunctionDef) -> bool:
    """Whether Numba compiles ``function``: by a decorator, or as one of an endpoint's C functions."""
    marks = [ast.unparse(mark).rpartition(".")[2] for mark in function.decorator_list]
    return "compiled" in marks or "inlined" in marks or function.name in _of_endpoints((ROOT / path).read_text())


@functools.cache
def _of_endpoints(source: str) -> frozenset[str]:
    """The functions of ``source`` that are given to an endpoint."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    given = [name for call in calls if ast.unparse(call.func).endswith("DataFunctions") for name in call.args]
    return frozenset(map(ast.unparse, given))


def mutated(ways: Mapping[str, Way], files: Mapping[str, Path], address: int) -> dict[Path, str]:
    """The source of ``files`` with a switch for each rule: while the word at ``address`` is N, the N-th of ``ways``,
    counted from 1, is out of force."""
    edits: dict[Path, list[_Edit]] = {}
    for number, (rule, way) in enumerate(ways.items(), start=1):
        path = files[rule]
        node, function = held((ROOT / path).read_text(), rule)
        before, after = way.around(_switch(path, function, address, number), " " * node.col_offset)
        place = node if way.whole else _value(node, way.part)
        edits.setdefault(path, []).append(_Edit(place, before, after))
    sources = {}
    for path, here in edits.items():
        source = _edited((ROOT / path).read_text(), here)
        if _PEEK in source:
            imports = (node for node in ast.parse(source).body if isinstance(node, ast.Import | ast.ImportFrom))
            first = next(node for node in imports if getattr(node, "module", "") != "__future__")
            lines = source.split("\n")
            lines.insert(first.lineno - 1, f"from uccl_ep_serving.native.atomics import peek as {_PEEK}")
            source = "\n".join(lines)
        sources[path] = source
    return sources


def removed(rule: str, way: Way, path: Path) -> str:
    """The source of ``path`` with ``rule`` out of force for good: for kernels that are compiled for a device."""
    source = (ROOT / path).read_text()
    node, _ = held(source, rule)
    before, after = way.around(_Switch("True", "&", "|"), " " * node.col_offset)
    return _edited(source, [_Edit(node if way.whole else _value(node, way.part), before, after)])


def _edited(source: str, edits: list[_Edit]) -> str:
    """Around a statement comes what is put around its parts; of two edits of one text the first is the inner one."""
    text = source.encode()
    starts = [0, *(end.end() for end in re.finditer(b"\n", text))]
    insertions = []
    for number, (node, before, after) in enumerate(edits):
        start, end = starts[node.lineno - 1] + node.col_offset, starts[(node.end_lineno or 0) - 1]
        end += node.end_col_offset or 0
        insertions += [(start, start - end, -number, before), (end, end - start - len(text), number, after)]
    pieces, at = [], 0
    for place, _, _, inserted in sorted(insertions):
        pieces += [text[at:place], inserted.encode()]
        at = place
    return b"".join([*pieces, text[at:]]).decode()
