"""What happens to bytes on their way, by a random generator; of messages in a row."""

from __future__ import annotations

import random
from collections.abc import Sequence

__all__ = ["BYTES", "bound", "change"]

#: Kinds of change that know nothing of what the bytes mean.
BYTES = ("a bit", "bytes", "cut short", "left out", "repeated", "random bytes")


def change(rng: random.Random, kind: str, data: bytes) -> bytes:
    """``data`` after a change of ``kind``, one of BYTES."""
    changed = bytearray(data)
    at = rng.randrange(len(changed)) if rng.random() < 0.6 else rng.randrange(min(len(changed), 24))
    count = min(1 + rng.randrange(8), len(changed) - at)
    if kind == "a bit":
        changed[at] ^= 1 << rng.randrange(8)
    elif kind == "bytes":
        changed[at : at + count] = rng.randbytes(count)
    elif kind == "cut short":
        del changed[at:]
    elif kind == "left out":
        del changed[at : at + count]
    elif kind == "repeated":
        changed[at:at] = changed[at : at + count] if rng.random() < 0.5 else changed
    else:
        changed[:] = rng.randbytes(len(changed))
    return bytes(changed)


def bound(rng: random.Random, value: int, bits: int, others: Sequence[int] = ()) -> int:
    """A value for a field of ``bits``: beside ``value``, at an end of the range, one of ``others``, or any."""
    choices = (value + 1, value - 1, 0, 1, -1, 1 << bits - 1, (1 << bits - 1) - 1, rng.getrandbits(bits), *others)
    return rng.choice(choices) % (1 << bits)
