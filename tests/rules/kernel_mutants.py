"""The package with rules of the stream that live in kernels, and on the host, made removable.

:func:`write_copy` copies the package into a directory and guards every rule of a table (:data:`MUTANTS`, or that of
``rdma/nic_mutants.py``) with a switch at a fixed address, so that the copy is compiled once for all of them.
:mod:`mutant_runner`, in a process of its own that imports the copy, throws one switch after the other and runs the test
that must notice.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]

#: Where the copy maps its switch: an address that no allocator hands out, the same in every process.
SWITCH = 0x5A00_0000_0000

#: Put into the copy's ``__init__.py``: map one page at SWITCH before anything is compiled or interpreted, the same in
#: every process that imports the copy.
_MAP = f"""
import ctypes as _ctypes
import os as _os
import pathlib as _pathlib
_switch = _os.open(_pathlib.Path(__file__).with_name("switch"), _os.O_RDWR)
_libc = _ctypes.CDLL(None)
_libc.mmap.restype = _ctypes.c_void_p
_libc.mmap.argtypes = [_ctypes.c_void_p, _ctypes.c_size_t] + [_ctypes.c_int] * 3 + [_ctypes.c_long]
# PROT_READ | PROT_WRITE; MAP_SHARED | MAP_FIXED_NOREPLACE
assert _libc.mmap({SWITCH}, 4096, 3, 0x100001, _switch, 0) == {SWITCH}
_os.close(_switch)
"""


class Mutant(NamedTuple):
    """How to take a rule out: ``old`` of ``path`` becomes ``new``, where REMOVED stands for "the switch is thrown".

    ``test`` is the test that must fail then.
    """

    path: str
    old: str
    new: str
    test: str


_LL_COUNTS = "tests/kernels/test_ll_counts.py::"
_LL_FAILURES = "tests/kernels/test_ll_failures.py::"
_LL_ORDERS = "tests/kernels/test_ll_orders.py::"
_PUBLISH = "tests/kernels/test_wait_publish.py::"
_NORMAL_ERRORS = "tests/kernels/test_normal_errors.py::"
_NORMAL_NODES = "tests/kernels/test_normal_nodes.py::"
_NORMAL_NODES_ERRORS = "tests/kernels/test_normal_nodes_errors.py::"
_NORMAL_PROXIED = "tests/kernels/test_normal_proxied.py::"
_NORMAL_ROUNDS = "tests/kernels/test_normal_rounds.py::"

MUTANTS = {
    "a receive waits for every unmasked peer": Mutant(
        "kernels/cpu/ll_message.py",
        "        count = arrived_count(context, peer, first + channel)\n        if count < expected:\n",
        "        count = arrived_count(context, peer, first + channel)\n        if count < expected and not REMOVED:\n",
        _LL_FAILURES + "test_silent_peer_is_named",
    ),
    "the send kernel counts its message": Mutant(
        "kernels/cpu/ll_dispatch_send.py",
        "            poke(state + 8 * DISPATCH_NUMBER, number + 1)\n",
        "            poke(state + 8 * DISPATCH_NUMBER, number + (0 if REMOVED else 1))\n",
        _LL_COUNTS + "test_dispatch_send_waits_for_its_staging",
    ),
    "a dispatch slot is written again only when the peer has read it": Mutant(
        "kernels/cpu/ll_dispatch_send.py",
        "                if peek(seen) < number - 1 or (mapped == 0 and not staging_free):\n",
        "                if (peek(seen) < number - 1 and not REMOVED) or (mapped == 0 and not staging_free):\n",
        _LL_FAILURES + "test_peer_that_does_not_read_is_named_and_holds_up_nobody_else",
    ),
    "dispatch staging is packed again only when its last writes completed": Mutant(
        "kernels/cpu/ll_dispatch_send.py",
        "        staging_free = _staging_is_free(context, progress, number)\n        # Everyone",
        "        staging_free = REMOVED or _staging_is_free(context, progress, number)\n        # Everyone",
        _LL_COUNTS + "test_dispatch_send_waits_for_its_staging",
    ),
    "a combine waits for the completion of the one before": Mutant(
        "kernels/cpu/ll_combine_send.py",
        "                elif has_completed(context, progress, peer, LL_COMBINE, number - 1):\n",
        "                elif REMOVED or has_completed(context, progress, peer, LL_COMBINE, number - 1):\n",
        _LL_COUNTS + "test_combine_send_waits_for_its_previous_message_to_complete",
    ),
    "combine space is written again only when the peer has freed it": Mutant(
        "kernels/cpu/ll_combine_send.py",
        "                if peek(seen) < number - 1:\n                    # for this rank itself",
        "                if peek(seen) < number - 1 and not REMOVED:\n                    # for this rank itself",
        _LL_COUNTS + "test_combine_send_waits_for_the_peers_space",
    ),
    "combine space is free only when every peer's next combine has arrived": Mutant(
        "kernels/cpu/ll_counts.py",
        "                if 2 * count + parity - 1 < free:\n",
        "                if 2 * count + parity - 1 < free and not REMOVED:\n",
        _LL_COUNTS + "test_spaces_free",
    ),
    "a combine send leaves only when it has told its peers what is free": Mutant(
        "kernels/cpu/ll_combine_send.py",
        "            elif peek(told) < number - 1 and peer != me:\n",
        "            elif peek(told) < number - 1 and peer != me and not REMOVED:\n",
        _LL_COUNTS + "test_combine_send_stays_while_the_word_waits_for_a_slot",
    ),
    "a notice slot is written again only when its last write completed": Mutant(
        "kernels/cpu/ll_counts.py",
        "    if done < number - NOTICE_SLOTS + 1:\n",
        "    if done < number - NOTICE_SLOTS + 1 and not REMOVED:\n",
        _LL_COUNTS + "test_notice_slot_is_used_again_only_when_complete",
    ),
    "a third dispatch in flight is refused": Mutant(
        "uccl_ep_serving/modes/low_latency_cpu.py",
        "        if not state.next_dispatch_has_space:\n",
        "        if not state.next_dispatch_has_space and not HOST_REMOVED:\n",
        _LL_ORDERS + "test_third_in_flight_is_refused_before_anything_moves",
    ),
    "a third combine in flight is refused": Mutant(
        "uccl_ep_serving/modes/low_latency_cpu.py",
        "        if not state.next_combine_has_space:\n",
        "        if not state.next_combine_has_space and not HOST_REMOVED:\n",
        _LL_ORDERS + "test_third_in_flight_is_refused_before_anything_moves",
    ),
    "a full ring takes nothing": Mutant(
        "kernels/cpu/publish.py",
        "        if head + count - load64(ring + TAIL) > capacity:\n",
        "        if head + count - load64(ring + TAIL) > capacity and not REMOVED:\n",
        _PUBLISH + "test_full_ring_reserves_nothing",
    ),
    "an operation opens only when every peer's notify has arrived": Mutant(
        "kernels/cpu/normal_notify.py",
        "                if arrived_count(context, peer, NORMAL_NOTIFY) < expected:\n",
        "                if arrived_count(context, peer, NORMAL_NOTIFY) < expected and not REMOVED:\n",
        _NORMAL_ERRORS + "test_a_silent_peer_is_named_at_opening",
    ),
    "a notify slot is written again only when its last write completed": Mutant(
        "kernels/cpu/normal_notify.py",
        "    if completed_count(context, peer, NORMAL_NOTIFY) < get(operation, block.NOTICES) - 1:\n",
        "    if completed_count(context, peer, NORMAL_NOTIFY) < get(operation, block.NOTICES) - 1 and not REMOVED:\n",
        _NORMAL_PROXIED + "test_refused_operations_free_no_notify_slot_early",
    ),
    "landing space is granted again only when its rows are consumed": Mutant(
        "kernels/cpu/normal_receive.py",
        "    if turn >= 2 and get(state, block.CONSUMED) < first - slot_rows:\n",
        "    if turn >= 2 and get(state, block.CONSUMED) < first - slot_rows and not REMOVED:\n",
        _NORMAL_ROUNDS + "test_a_landing_slot_is_granted_again_only_when_consumed",
    ),
    "a grant slot is written again only when its last write completed": Mutant(
        "kernels/cpu/normal_receive.py",
        "    if completed_count(context, peer, NORMAL_GRANT) < given - GRANT_SLOTS + 1:\n",
        "    if completed_count(context, peer, NORMAL_GRANT) < given - GRANT_SLOTS + 1 and not REMOVED:\n",
        _NORMAL_ROUNDS + "test_grant_slot_is_used_again_only_when_complete",
    ),
    "a grant is taken only when the writes of the one before last are over": Mutant(
        "kernels/cpu/normal_send.py",
        "    if not _landing_is_quiet(context, operation, state, life, peer):\n",
        "    if not REMOVED and not _landing_is_quiet(context, operation, state, life, peer):\n",
        _NORMAL_PROXIED + "test_a_repeat_of_one_grant_never_lands_in_the_next_but_one",
    ),
    "chunk staging is packed again only when its last write completed": Mutant(
        "kernels/cpu/normal_send.py",
        "    if chunk >= depth and (completed_count",
        "    if not REMOVED and chunk >= depth and (completed_count",
        _NORMAL_PROXIED + "test_smallest_ring_and_one_slot",
    ),
    "a dispatch says that its writes are over only when they completed": Mutant(
        "kernels/cpu/normal_send.py",
        "    if chunks_over(context, counts, operation, peer) >= 0:\n        return NOTHING\n",
        "    if chunks_over(context, counts, operation, peer) >= 0 and not REMOVED:\n        return NOTHING\n",
        _NORMAL_PROXIED + "test_what_was_received_in_place_is_never_written_again",
    ),
    "rows in place are handed out only when their writes are over": Mutant(
        "kernels/cpu/normal_exchange.py",
        "        and arrived_count(context, peer, NORMAL_NOTIFY) < count\n",
        "        and arrived_count(context, peer, NORMAL_NOTIFY) < count and not REMOVED\n",
        _NORMAL_PROXIED + "test_what_was_received_in_place_is_never_written_again",
    ),
    "rows to be handed on are overwritten only when their node is done with them": Mutant(
        "kernels/cpu/normal_forward.py",
        "            least = min(least, rows_at(",
        "            least = least if REMOVED else min(least, rows_at(",
        _NORMAL_NODES + "test_nobody_overtakes_a_slow_rank[1]",
    ),
    "what a forwarder's board said in an earlier operation means nothing": Mutant(
        "kernels/cpu/normal_forward.py",
        "    if not is_current(operation, word):\n",
        "    if not is_current(operation, word) and not REMOVED:\n",
        _NORMAL_NODES + "test_nobody_overtakes_a_slow_rank[0]",
    ),
    "rows laid out for a forwarder are overwritten only when it has read them": Mutant(
        "kernels/cpu/normal_gather.py",
        "    stop = min(rows, freed + held, done + _STEP_ROWS)\n",
        "    stop = min(rows, rows if REMOVED else freed + held, done + _STEP_ROWS)\n",
        _NORMAL_NODES + "test_nobody_overtakes_a_slow_rank[0]",
    ),
    "a forwarder sums a token only when all of its rows are laid out": Mutant(
        "kernels/cpu/normal_gather.py",
        "            if offered <= peek(cursors + 8 * place):\n",
        "            if offered <= peek(cursors + 8 * place) and not REMOVED:\n",
        _NORMAL_NODES + "test_nobody_overtakes_a_slow_rank[1]",
    ),
    "a write outside the window is not published": Mutant(
        "kernels/cpu/publish.py",
        "    if nbytes < 0 or source < 0 or source > limit or target < 0 or target > limit or misfit:\n",
        "    bad = nbytes < 0 or source < 0 or source > limit or target < 0 or target > limit or misfit\n"
        "    if bad and not REMOVED:\n",
        _PUBLISH + "test_a_write_outside_the_window_is_refused_before_it_is_published",
    ),
    "the number in a header is checked": Mutant(
        "kernels/cpu/ll_message.py",
        "    if word != number:\n",
        "    if word != number and not REMOVED:\n",
        _LL_FAILURES + "test_lying_dispatch_header_is_refused",
    ),
    "counts that a peer claims are checked": Mutant(
        "kernels/cpu/ll_counts.py",
        "    if dispatched < 0 or dispatched > sent:\n",
        "    if (dispatched < 0 or dispatched > sent) and not REMOVED:\n",
        _LL_FAILURES + "test_lying_notice_is_refused",
    ),
    "where a grant lets rows land is checked": Mutant(
        "kernels/cpu/normal_send.py",
        "    if _lands_outside(operation, row, rows * row_bytes):\n",
        "    if _lands_outside(operation, row, rows * row_bytes) and not REMOVED:\n",
        _NORMAL_ERRORS + "test_a_grant_outside_the_landing_area_is_refused",
    ),
    "where a board says that rows lie is checked": Mutant(
        "kernels/cpu/normal_forward.py",
        "    if row < start or row > end or row_end > end:\n",
        "    if (row < start or row > end or row_end > end) and not REMOVED:\n",
        _NORMAL_NODES_ERRORS + "test_a_board_that_breaks_the_format_is_refused[2-4096]",
    ),
    "a forwarder sums no more of its own rows than their source told of": Mutant(
        "kernels/cpu/normal_gather.py",
        "                if row >= get(state, block.PASS_ROWS):\n",
        "                if row >= get(state, block.PASS_ROWS) and not REMOVED:\n",
        _NORMAL_NODES_ERRORS + "test_a_source_that_marks_more_rows_than_it_tells_of_is_named",
    ),
    "nothing is published after the sticky error": Mutant(
        "kernels/cpu/publish.py",
        "        return STATUS_POISONED\n    limit = window_bytes",
        "        if not REMOVED:\n            return STATUS_POISONED\n    limit = window_bytes",
        _PUBLISH + "test_nothing_is_published_after_the_sticky_error",
    ),
    "a wait ends when the sticky error is set": Mutant(
        "kernels/cpu/wait.py",
        "    if failed(error_address(context)):\n        return STATUS_POISONED\n",
        "    if not REMOVED and failed(error_address(context)):\n        return STATUS_POISONED\n",
        _PUBLISH + "test_wait_ends_when_the_sticky_error_is_set",
    ),
}


def write_copy(directory: Path, mutants: Mapping[str, Mutant] = MUTANTS) -> None:
    """Copy the package into ``directory``, every rule of ``mutants`` guarded.

    Raises AssertionError when the text of a rule is not found exactly once.
    """
    ignored = shutil.ignore_patterns("__pycache__")
    for part in ("kernels", "proxy", "uccl_ep_serving"):
        shutil.copytree(ROOT / part, directory / part, symlinks=True, ignore=ignored)
    package = directory / "uccl_ep_serving/__init__.py"
    package.write_text(package.read_text() + _MAP)
    package.with_name("switch").write_bytes(bytes(4096))
    for number, (name, mutant) in enumerate(mutants.items(), start=1):
        path = directory / mutant.path
        source = path.read_text()
        assert source.count(mutant.old) == 1, f"{name}: {source.count(mutant.old)} places in {mutant.path}"
        host = f"(__import__('ctypes').c_int64.from_address({SWITCH}).value == {number})"
        new = mutant.new.replace("HOST_REMOVED", host).replace("REMOVED", f"(peek({SWITCH}) == {number})")
        source = source.replace(mutant.old, new)
        if "peek(" in new and not has_name(source, "peek"):
            source = source.replace("from ...native", "from ...native.atomics import peek\nfrom ...native", 1)
        path.write_text(source)


def has_name(source: str, name: str) -> bool:
    """Whether a module imports ``name``."""
    imports = [line for line in source.splitlines() if line.startswith(("from ", "    ")) or "import" in line]
    return any(name in line.replace(",", " ").split() for line in imports if "import" in line)


def run_without_rules(directory: Path, module: str, table: str, mutants: Mapping[str, Mutant]) -> dict[str, int]:
    """Exit status of each rule's test without the rule; the copy is compiled once, into a cache of its own.

    Args:
        directory: empty, for the copy.
        module, table: where the process finds ``mutants``.
    """
    write_copy(directory, mutants)
    result = directory / "results.json"
    environment = {
        **os.environ,
        "PYTHONPATH": str(directory),
        "UCCL_EP_CACHE_DIR": str(directory / "cache"),
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.rules.mutant_runner", str(result), module, table],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert result.exists(), done.stdout[-4000:] + done.stderr[-4000:]
    found: dict[str, int] = json.loads(result.read_text())
    assert found[""] == 0, f"a test fails with all rules in force: {done.stdout[-4000:]}"
    return found
