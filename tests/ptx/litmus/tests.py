"""All litmus tests."""

from __future__ import annotations

from tests.ptx.litmus.bulk_copies import BULK_COPIES
from tests.ptx.litmus.classics import COHERENCE, LOAD_BUFFERING, SEVERAL_WRITERS, STORE_BUFFERING
from tests.ptx.litmus.cumulativity import ATOMICS, BARRIERS, CHAINS
from tests.ptx.litmus.message_passing import MESSAGE_PASSING

ALL = (
    MESSAGE_PASSING
    + STORE_BUFFERING
    + LOAD_BUFFERING
    + SEVERAL_WRITERS
    + COHERENCE
    + CHAINS
    + BARRIERS
    + ATOMICS
    + BULK_COPIES
)
