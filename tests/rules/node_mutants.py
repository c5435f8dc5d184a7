"""Rules of normal mode between nodes that kernels on a device hold, made removable, as in :mod:`device_mutants`."""

from __future__ import annotations

from tests.rules.mutation import INSTEAD, Mutant, Rules

_NODES = "tests/kernels/test_triton_normal_nodes.py::"

NODE_MUTANTS = Rules(
    ("kernels/triton", "uccl_ep_serving"),
    {
        "a token crosses once to a node": Mutant(
            INSTEAD("tl.sum((tl.load(at, mask=here, other=0) != 0).to(tl.int32), axis=1)"),
            _NODES + "test_a_node_sums_in_float32_and_rounds_once",
        ),
        "a node sums in float32 and rounds once": Mutant(
            INSTEAD("(total + parts[step]).to(tl.bfloat16).to(tl.float32)"),
            _NODES + "test_a_node_sums_in_float32_and_rounds_once",
        ),
        "a sum of one row is that row": Mutant(
            INSTEAD("tl.zeros([index.shape[0], column.shape[1]], tl.float32)"),
            _NODES + "test_a_node_sums_in_float32_and_rounds_once",
        ),
        "rows whose marks were not kept are not summed": Mutant(
            INSTEAD("Marks(tensors.marks + row * nbytes, nbytes, total_rows)"),
            _NODES + "test_what_lies_behind_the_rows_of_a_broken_promise_is_not_summed[4]",
        ),
    },
)
"""By what the rule says. Tests run in rank processes, which share the switch."""
