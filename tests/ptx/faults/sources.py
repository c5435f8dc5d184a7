"""Kernels of low latency made wrong in their source, and compiled by Triton like the product's own."""

from __future__ import annotations

import ast
import contextlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.rules.family import execute
from tests.rules.mutation import ROOT
from uccl_ep_serving.kernels.triton import launch

_PACKAGE = "uccl_ep_serving.kernels.triton"
_DIRECTORY = Path("kernels/triton")
#: In the order in which they import each other.
_FAMILY = (
    "words",
    "context",
    "blocks",
    "quant",
    "wait",
    "publish",
    "ll_counts",
    "routing",
    "ll_message",
    "ll_dispatch",
    "ll_combine",
    "low_latency",
)


@contextlib.contextmanager
def serving(sources: Mapping[Path, str], directory: Path) -> Iterator[None]:
    """Inside, low latency is served by kernels of ``sources``, by path from the root of the checkout.

    Args:
        directory: where the compiler finds them.
    """
    name = f"{_PACKAGE}.low_latency"
    mutant = execute([f"{_PACKAGE}.{short}" for short in _FAMILY], sources, directory)[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mutant, "present_target", lambda: launch.Target(1, 32))
        patch.setitem(sys.modules, name, mutant)
        yield


@dataclass(frozen=True)
class Change:
    """What is put for what, wherever it stands in one function.

    Attributes:
        function: ``"publish.put_writes"``.
    """

    function: str
    before: str
    after: str


def changed(*changes: Change) -> dict[Path, str]:
    """The sources with ``changes``. Raises AssertionError where one finds nothing to change."""
    sources: dict[Path, str] = {}
    for change in changes:
        module, _, function = change.function.partition(".")
        path = _DIRECTORY / f"{module}.py"
        source = sources.get(path) or (ROOT / path).read_text()
        (node,) = [one for one in ast.parse(source).body if isinstance(one, ast.FunctionDef) and one.name == function]
        lines = source.split("\n")
        body = "\n".join(lines[node.lineno - 1 : node.end_lineno])
        assert change.before in body, f"{change.function} has no {change.before!r}"
        lines[node.lineno - 1 : node.end_lineno] = body.replace(change.before, change.after).split("\n")
        sources[path] = "\n".join(lines)
    return sources


_PARITY, _OTHER_PARITY, _NO_PARITY = "(number & 1)", "((number + 1) & 1)", "(number & 0)"
#: By what they do wrong. Bits that tell one lap of a ring from the next.
LAPS: dict[str, tuple[Change, ...]] = {
    "the lap bit never changes": (Change("publish.put_writes", "((index // capacity) + 1) & 1", "(index * 0) + 1"),),
    "the lap bit is the other one": (Change("publish.put_writes", "((index // capacity) + 1)", "(index // capacity)"),),
    "the low word has no lap bit": (Change("publish.put_writes", "low = lap | (", "low = ("),),
    "the high word has no lap bit": (Change("publish.put_writes", "high = lap | (", "high = ("),),
    "the low word is always of the first lap": (Change("publish.put_writes", "low = lap | (", "low = 1 | ("),),
    "the high word is always of the first lap": (Change("publish.put_writes", "high = lap | (", "high = 1 | ("),),
}
#: Bits that tell a message from the one before: in streams and their counts, in landing slots, in staging.
PARITIES: dict[str, tuple[Change, ...]] = {
    "both parities share streams": (Change("context.stream_of", _PARITY, _NO_PARITY),),
    "a sender takes the other parity's streams": (
        Change("publish.put_messages", "stream_of(phase, number)", "stream_of(phase, number + 1)"),
    ),
    "a receiver waits for one message less": (Change("wait.wait_messages", "number // 2 + 1", "number // 2"),),
    "a sender tells of one message less": (Change("publish.put_messages", "number // 2 + 1", "number // 2"),),
    "a sender tells of one message more": (Change("publish.put_messages", "number // 2 + 1", "number // 2 + 2"),),
    "dispatches of both parities land in one place": (
        Change("routing._place_dispatches", "(parity * group", "(parity * 0"),
        Change("ll_message.dispatch_arrival", _PARITY, _NO_PARITY),
        Change("ll_dispatch._message", _PARITY, _NO_PARITY),
        Change("ll_counts._listen", _PARITY, _NO_PARITY),
    ),
    "a dispatch is unpacked from where the other parity lands": (
        Change("ll_dispatch._message", _PARITY, _OTHER_PARITY),
    ),
    "combines of both parities land in one place": (
        Change("ll_combine.prepare_combine", "parity * peek(state + S_COMBINE_RECV_STEP)", "0"),
        Change("ll_message.combine_arrival", "+ (number & 1) * peek", "+ (number & 0) * peek"),
        Change("ll_combine.sum_rows", _PARITY, _NO_PARITY),
    ),
    "a combine is summed from where the other parity lands": (Change("ll_combine.sum_rows", _PARITY, _OTHER_PARITY),),
    "dispatches of both parities are packed in one place": (
        Change("routing._place_dispatches", "parity * peek(state + S_DISPATCH_SEND_STEP)", "0"),
    ),
    "combines of both parities are packed in one place": (
        Change("ll_combine.prepare_combine", "parity * peek(state + S_COMBINE_SEND_STEP)", "0"),
    ),
}
