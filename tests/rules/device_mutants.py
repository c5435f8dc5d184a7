"""Rules that kernels on a device hold, made removable: in Triton's interpreter they are Python, like the switch."""

from __future__ import annotations

from tests.rules.mutation import ALWAYS, INSTEAD, NEVER, SKIP, Mutant, Rules

_LOW_LATENCY = "tests/kernels/test_triton_low_latency.py::"
_NORMAL = "tests/kernels/test_triton_normal.py::"
_NODES = "tests/kernels/test_triton_normal_nodes.py::"

DEVICE_MUTANTS = Rules(
    ("kernels/triton", "uccl_ep_serving"),
    {
        "low latency: a receive waits for every unmasked peer": Mutant(
            ALWAYS,
            _LOW_LATENCY + "test_a_silent_peer_is_named[mapped]",
        ),
        "a wait ends when the sticky error is set": Mutant(
            NEVER,
            "tests/kernels/test_device_waits.py::test_the_sticky_error_ends_a_wait_soon[short spins]",
        ),
        "a waiting kernel leaves memory of the host alone most of the time": Mutant(
            ALWAYS,
            "tests/kernels/test_device_waits.py::test_memory_of_the_host_is_read_now_and_then",
        ),
        "low latency: the send kernel counts its message": Mutant(
            SKIP,
            _LOW_LATENCY + "test_replays_without_the_host",
        ),
        "low latency: an expert id is compared before it is cut to 32 bits": Mutant(
            ALWAYS.of(1),
            _LOW_LATENCY + "test_expert_ids_that_do_not_exist_are_named_and_everybody_goes_on",
        ),
        "low latency: the host is told of an expert id out of range": Mutant(
            NEVER,
            _LOW_LATENCY + "test_expert_ids_that_do_not_exist_are_named_and_everybody_goes_on",
        ),
        "low latency: the host releases kernels that wait for a peer which wants other windows": Mutant(
            SKIP,
            _LOW_LATENCY + "test_different_calls_are_named_at_once_on_every_rank[low latency-mapped]",
        ),
        "control: the host releases kernels that wait for a peer which is in the other mode": Mutant(
            SKIP,
            _LOW_LATENCY + "test_different_calls_are_named_at_once_on_every_rank[modes-mapped]",
        ),
        "low latency: a message of another shape is refused": Mutant(
            SKIP,
            _LOW_LATENCY + "test_different_calls_are_named_at_once_on_every_rank[shapes-mapped]",
        ),
        "normal mode: an operation opens only when every peer's notify has arrived": Mutant(
            ALWAYS,
            _NORMAL + "test_a_silent_peer_is_named",
        ),
        "normal mode: ranks that were given other operations part before anything is sent": Mutant(
            NEVER,
            _NORMAL + "test_ranks_that_differ_go_on",
        ),
        "normal mode: rows are those of the handle": Mutant(
            INSTEAD("chosen & (rows < 0)"),
            _NORMAL + "test_rows_that_the_handle_does_not_know_are_refused",
        ),
        "normal mode: a peer tells of no more rows than it has, and of none that do not fit": Mutant(
            INSTEAD("receive + (1 << 40)"),
            _NODES + "test_a_word_of_a_pipe_that_cannot_be_is_refused[0-5]",
        ),
        "normal mode: a peer has read no more rows than there were": Mutant(
            INSTEAD("mapped & (sent < 0)"),
            _NODES + "test_a_word_of_a_pipe_that_cannot_be_is_refused[1-1000]",
        ),
        "normal mode: the host is told that more rows came than num_worst_tokens promised": Mutant(
            NEVER,
            _NORMAL + "test_worst_case_and_cached[mapped]",
        ),
        "normal mode: the host is told of an expert id out of range": Mutant(
            NEVER,
            _NORMAL + "test_expert_ids_that_do_not_exist_are_named_and_everybody_goes_on[0-of the layout]",
        ),
        "normal mode: an expert id out of range counts nowhere": Mutant(
            ALWAYS.of(1),
            _NORMAL + "test_expert_ids_that_do_not_exist_are_named_and_everybody_goes_on[0-of the layout]",
        ),
    },
)
"""By what the rule says. Tests run in rank processes, which share the switch."""
