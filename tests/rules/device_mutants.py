"""Rules that kernels on a device hold, made removable: in Triton's interpreter they are Python, like the switch."""

from __future__ import annotations

from tests.rules.kernel_mutants import Mutant

_LOW_LATENCY = "tests/kernels/test_triton_low_latency.py::"
_NORMAL = "tests/kernels/test_triton_normal.py::"

DEVICE_MUTANTS = {
    "low latency: a receive waits for every unmasked peer": Mutant(
        "kernels/triton/wait.py",
        "        here = (count >= expected) | (live == 0)\n",
        "        here = (count >= expected) | (live == 0) | HOST_REMOVED\n",
        _LOW_LATENCY + "test_a_silent_peer_is_named[mapped]",
    ),
    "a wait ends when the sticky error is set": Mutant(
        "kernels/triton/wait.py",
        "    if due != 0:\n",
        "    if (due != 0) & (not HOST_REMOVED):\n",
        "tests/kernels/test_device_waits.py::test_the_sticky_error_ends_a_wait_soon[short turns]",
    ),
    "a waiting kernel leaves memory of the host alone most of the time": Mutant(
        "kernels/triton/wait.py",
        "    due = uniform((late | (now - looked > LOOK_NS)).to(tl.int32), BACKEND)\n",
        "    due = uniform((late | (now - looked > LOOK_NS) | HOST_REMOVED).to(tl.int32), BACKEND)\n",
        "tests/kernels/test_device_waits.py::test_memory_of_the_host_is_read_now_and_then",
    ),
    "low latency: the send kernel counts its message": Mutant(
        "kernels/triton/ll_dispatch_send.py",
        "            poke(state + S_DISPATCH_NUMBER, number + 1)\n",
        "            poke(state + S_DISPATCH_NUMBER, number + (0 if HOST_REMOVED else 1))\n",
        _LOW_LATENCY + "test_replays_without_the_host",
    ),
    "low latency: an expert id is compared before it is cut to 32 bits": Mutant(
        "kernels/triton/routing.py",
        "        right = (other >= 0) & (other < experts)\n",
        "        right = (other >= 0) & ((other < experts) | HOST_REMOVED)\n",
        _LOW_LATENCY + "test_expert_ids_that_do_not_exist_are_named_and_everybody_goes_on",
    ),
    "low latency: the host is told of an expert id out of range": Mutant(
        "kernels/triton/routing.py",
        "    if wrong < (1 << 60):\n",
        "    if wrong < ((1 << 60) if not HOST_REMOVED else 0):\n",
        _LOW_LATENCY + "test_expert_ids_that_do_not_exist_are_named_and_everybody_goes_on",
    ),
    "low latency: the host releases kernels that wait for a peer which wants other windows": Mutant(
        "uccl_ep_serving/data_plane/watch.py",
        "            self._stop_kernels(ctx.FAILURE_LAYOUT, other)\n",
        "            if not HOST_REMOVED:\n                self._stop_kernels(ctx.FAILURE_LAYOUT, other)\n",
        _LOW_LATENCY + "test_different_calls_are_named_at_once_on_every_rank[low latency-mapped]",
    ),
    "normal mode: an operation opens only when every peer's notify has arrived": Mutant(
        "kernels/triton/normal_wait.py",
        "        present = uniform(tl.min((count >= needed).to(tl.int32), axis=0), BACKEND)\n",
        "        present = uniform(tl.min(((count >= needed) | HOST_REMOVED).to(tl.int32), axis=0), BACKEND)\n",
        _NORMAL + "test_a_silent_peer_is_named",
    ),
    "normal mode: ranks that were given other operations part before anything is sent": Mutant(
        "kernels/triton/normal_notify.py",
        "        other = live & (told_shape != shape)\n",
        "        other = live & (told_shape != shape) & (not HOST_REMOVED)\n",
        _NORMAL + "test_ranks_that_differ_go_on",
    ),
    "normal mode: the last kernel takes the turns that the host has not launched": Mutant(
        "kernels/triton/normal_finish.py",
        "        going = (peek(state + W_OPEN) == 1).to(tl.int32)\n",
        "        going = ((peek(state + W_OPEN) == 1) & (not HOST_REMOVED)).to(tl.int32)\n",
        _NORMAL + "test_turns_that_the_host_did_not_launch",
    ),
    "normal mode: the host is told that more rows came than num_worst_tokens promised": Mutant(
        "kernels/triton/normal_place.py",
        "    if (KIND == _DISPATCH) & (capacity > 0):\n",
        "    if (KIND == _DISPATCH) & (capacity > 0) & (not HOST_REMOVED):\n",
        _NORMAL + "test_worst_case_and_cached[mapped]",
    ),
    "normal mode: an expert id out of range counts nowhere": Mutant(
        "kernels/triton/normal_layout.py",
        "        right = (expert >= 0) & (expert < experts)\n",
        "        right = (expert >= 0) & ((expert < experts) | HOST_REMOVED)\n",
        _NORMAL + "test_expert_ids_that_do_not_exist_are_named_and_everybody_goes_on[0]",
    ),
}
"""By what the rule says. Tests run in rank processes, which share the switch."""
