"""Blocks of words: what the host puts into them, and how code inside Triton's kernels names them."""

from __future__ import annotations

import ast
import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from uccl_ep_serving.kernels.blocks import low_latency, low_latency_device, normal, normal_device
from uccl_ep_serving.kernels.triton import blocks as words
from uccl_ep_serving.protocol.layout import LowLatencyPlan, NormalPlan, WindowLayout

BLOCKS = Path(__file__).parents[2] / "kernels" / "blocks"
TRITON = Path(__file__).parents[2] / "kernels" / "triton"


def test_tables_start_after_the_words() -> None:
    assert low_latency.COMBINE_AHEAD < low_latency.PEER_TABLES
    assert low_latency.WEIGHTS < low_latency.ROUTE_TABLES
    assert low_latency_device.PLACED < low_latency_device.STATE_WORDS
    assert low_latency_device.ROUTE_FILLED < low_latency_device.ROUTE_WORDS
    assert normal.ROUTE < normal.OPERATION_WORDS
    assert normal.FILLED < normal.PEER_WORDS
    assert normal_device.TICKETS < normal_device.STATE_WORDS


@pytest.mark.parametrize("path", sorted(BLOCKS.glob("*.py")), ids=lambda path: path.stem)
def test_every_word_is_described_where_it_is_declared(path: Path) -> None:
    lines = path.read_text().splitlines()
    declared = [number for number, line in enumerate(lines) if "= next(_" in line and not line.startswith("_")]
    bare = [
        lines[number] for number in declared if "  # " not in lines[number] and not lines[number - 1].startswith("# ")
    ]
    assert bare == []
    assert declared or path.stem == "__init__"


@pytest.mark.parametrize("sizes", [(2, 5, 64, 16, 3, 2), (4, 3, 64, 20, 1, 2), (3, 1, 64, 33, 7, 2)])
def test_the_arrays_of_a_route_lie_apart_and_inside_it(sizes: tuple[int, ...]) -> None:
    """Each has room for what is said beside its word; kernels write all of it."""
    device = torch.device("cpu")
    plan = LowLatencyPlan(*sizes)
    block = low_latency_device.DevicePlan(plan, device)
    words = torch.frombuffer(
        (ctypes.c_int64 * low_latency_device.ROUTE_WORDS).from_address(block.address), dtype=torch.int64
    )
    ranks, tokens, slots = plan.ranks, plan.tokens, plan.topk
    needed = {
        low_latency_device.ROUTE_RETURNS: 8 * tokens * slots,
        low_latency_device.ROUTE_EARLIER: 8 * ranks * tokens,
        low_latency_device.ROUTE_PLACES: 4 * ranks * tokens * slots,
        low_latency_device.ROUTE_WEIGHTS: 4 * ranks * tokens * slots,
        low_latency_device.ROUTE_BEFORE: 4 * ranks * tokens,
        low_latency_device.ROUTE_FILLED: 4 * plan.local_experts,
    }
    tables = 8 * (low_latency_device.ROUTE_WORDS + len(low_latency_device.ROUTE_TABLES) * ranks)
    spans = sorted((int(words[word]), int(words[word]) + nbytes) for word, nbytes in needed.items())
    ends = [tables, *(end for _, end in spans)]
    starts = [*(start for start, _ in spans), 8 * len(block.new_route())]
    assert all(end <= start for end, start in zip(ends, starts, strict=True))
    assert all(start % 8 == 0 for start, _ in spans)


def test_a_device_block_holds_no_address_of_the_host() -> None:
    plan = LowLatencyPlan(2, 4, 64, 4, 2, 2)
    layout = WindowLayout(2, plan, NormalPlan(2))
    on_host = low_latency.StateBlock(layout)
    on_device = low_latency_device.DeviceState(layout, 2, torch.device("cpu"))
    assert on_host.words[low_latency.SCRATCH] != 0
    assert on_device.words[low_latency.SCRATCH] == 0
    fixed = low_latency.fixed_words(layout)
    assert {word: int(on_device.words[word]) for word in fixed} == fixed


def kernels(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    """What Triton compiles."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and any(
            ast.unparse(mark).startswith(("triton.jit", "kernel(")) for mark in node.decorator_list
        ):
            yield node


@pytest.mark.parametrize("path", sorted(TRITON.glob("*.py")), ids=lambda path: path.stem)
def test_kernels_read_constants_by_bare_names(path: Path) -> None:
    """The values of attributes are not in the key of Triton's cache: a stale kernel would be run. Of blocks all are."""
    tree = ast.parse(path.read_text())
    modules = {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    } - {"tl", *(name for name, value in vars(words).items() if isinstance(value, words.Words))}
    for kernel in kernels(tree):
        own = {argument.arg for argument in kernel.args.args}
        read = [
            f"line {node.lineno}: {ast.unparse(node)}"
            for statement in kernel.body
            for node in ast.walk(statement)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules - own
        ]
        assert read == []
