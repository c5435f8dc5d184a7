"""Kernels made wrong in their source, and compiled by Triton like the product's own."""

from __future__ import annotations

import ast
import contextlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.ptx.product.ranks import MARKED
from tests.rules.family import execute
from tests.rules.mutation import ROOT, Mutant, Rules, find, removed
from uccl_ep_serving.kernels.triton.target import Target

_PACKAGE = "uccl_ep_serving.kernels.triton"
_DIRECTORY = Path("kernels/triton")
_SHARED = ("words", "context", "blocks", "quant", "wait", "programs", "publish")
#: By mode, in the order in which they import each other.
_FAMILIES = {
    "low_latency": (
        *_SHARED,
        "ll_counts",
        "ll_message",
        "ll_routing",
        "ll_dispatch_send",
        "ll_dispatch_recv",
        "ll_combine_send",
        "ll_combine_recv",
        "low_latency",
    ),
    "normal": (
        *_SHARED,
        "routing",
        "normal_pipes",
        "normal_progress",
        "normal_notify",
        "normal_open",
        "normal_turns",
        "normal_rows",
        "normal_dispatch",
        "normal_combine",
        "normal",
    ),
}


@contextlib.contextmanager
def serving(sources: Mapping[Path, str], directory: Path, mode: str = "low_latency") -> Iterator[None]:
    """Inside, a mode is served by kernels of ``sources``, by path from the root of the checkout.

    Args:
        directory: where the compiler finds them.
    """
    name = f"{_PACKAGE}.{mode}"
    mutant = execute([f"{_PACKAGE}.{short}" for short in _FAMILIES[mode]], sources, directory)[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mutant, "present_target", lambda: Target(1, 32))
        patch.setattr(mutant, "_MARKED", MARKED, raising=False)
        patch.setitem(sys.modules, name, mutant)
        yield


@dataclass(frozen=True)
class Change:
    """What is put for what, wherever it stands in one function.

    Attributes:
        function: ``"publish.put_commands"``.
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


def without(rule: str, table: Rules[Mutant]) -> dict[Path, str]:
    """The sources without a rule of ``table``."""
    path = find(table)[rule]
    return {path: removed(rule, table[rule].way, path)}


_PARITY, _OTHER_PARITY, _NO_PARITY = "(number & 1)", "((number + 1) & 1)", "(number & 0)"
_PLACES = "ll_dispatch_send._place"
_RETURNED = "peek(state + S.COMBINE_RECV_STEP)"
#: By what they do wrong. Bits that tell one lap of a ring from the next.
LAPS: dict[str, tuple[Change, ...]] = {
    "the lap bit never changes": (
        Change("publish._command_words", "((index & capacity) == 0).to(tl.int64)", "(index * 0) + 1"),
    ),
    "the lap bit is the other one": (
        Change("publish._command_words", "(index & capacity) == 0", "(index & capacity) != 0"),
    ),
    "the low word has no lap bit": (Change("publish._command_words", "low = lap | (", "low = ("),),
    "the high word has no lap bit": (Change("publish._command_words", "high = lap | (", "high = ("),),
    "the low word is always of the first lap": (Change("publish._command_words", "low = lap | (", "low = 1 | ("),),
    "the high word is always of the first lap": (Change("publish._command_words", "high = lap | (", "high = 1 | ("),),
}
#: Bits that tell a message from the one before: in streams and their counts, in landing slots, in staging.
PARITIES: dict[str, tuple[Change, ...]] = {
    "both parities share streams": (Change("context.stream_of", _PARITY, _NO_PARITY),),
    "a sender takes the other parity's streams": (
        Change("ll_message.publish_message", "stream_of(PHASE, number)", "stream_of(PHASE, number + 1)"),
    ),
    "a receiver waits for one message less": (Change("wait.wait_messages", "number // 2 + 1", "number // 2"),),
    "a sender tells of one message less": (Change("ll_message.publish_message", "number // 2 + 1", "number // 2"),),
    "a sender tells of one message more": (Change("ll_message.publish_message", "number // 2 + 1", "number // 2 + 2"),),
    "dispatches of both parities land in one place": (
        Change(_PLACES, "parity * rank_count", "0 * rank_count"),
        Change("ll_dispatch_recv._landed", "(one.number & 1)", "(one.number & 0)"),
        Change("ll_counts._message_place", "parity * rank_count", "0 * rank_count"),
    ),
    "a dispatch is unpacked from where the other parity lands": (
        Change("ll_dispatch_recv._landed", "(one.number & 1)", "((one.number + 1) & 1)"),
    ),
    "combines of both parities land in one place": (
        *(
            Change(place, f"parity * {_RETURNED}", "0")
            for place in ("ll_counts._message_place", "ll_combine_send._serve")
        ),
        *(
            Change(place, f"{_PARITY} * {_RETURNED}", f"{_NO_PARITY} * {_RETURNED}")
            for place in ("ll_combine_recv._hear", "ll_combine_recv._sum_rows")
        ),
    ),
    "a combine is summed from where the other parity lands": (
        Change("ll_combine_recv._sum_rows", _PARITY, _OTHER_PARITY),
    ),
    "dispatches of both parities are packed in one place": (
        Change(_PLACES, "parity * peek(state + S.DISPATCH_SEND_STEP)", "0"),
    ),
}
#: When staging, which all combines share, may be packed again.
STAGING: dict[str, tuple[Change, ...]] = {
    "a combine does not wait for the one before": (
        Change("ll_counts.wait_space", "over = number - 1", "over = number - 2"),
    ),
    "a combine waits for the one before of its own peer alone": (
        Change("ll_counts.wait_space", "live = is_live(context, others)", "live = others == peer"),
    ),
}
#: What programs of a kernel tell each other from what those of an earlier kernel said.
STAMPS: dict[str, tuple[Change, ...]] = {
    "a stamp does not name the message": (Change("programs.stamp_of", "(number << 2)", "(number * 0)"),),
    "a stamp does not name the kernel": (Change("programs.stamp_of", "| KERNEL", "| 0"),),
}
#: Words of a header that each thread reads for itself.
READERS: dict[str, tuple[Change, ...]] = {
    "the words of a dispatch have many readers": (
        Change(
            "ll_dispatch_recv._take_header",
            "word_of(words, AT_CODING), word_of(words, AT_ROWS)",
            "peek(message + AT_CODING), peek(message + AT_ROWS)",
        ),
    ),
    "the words of a combine have many readers": (
        Change(
            "ll_combine_recv._hear",
            "word_of(words, AT_CODING), word_of(words, AT_ROWS)",
            "peek(header + AT_CODING), peek(header + AT_ROWS)",
        ),
    ),
}
