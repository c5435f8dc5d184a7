"""Rows from a rank through a ring in another one's shared memory and back: what every kernel with bulk copies does."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from tests.ptx.cuda.sources import Edit, kernel, unchanged
from tests.ptx.machine.machine import Machine
from tests.ptx.memory.sequential import Sequential
from tests.ptx.memory.weak import Weak
from tests.ptx.texts import memory

#: Of a run of 30 words, and of one that sums them; at most half as many are usual.
LIMIT_STEPS, SUM_STEPS = 15_000, 3_000
SEED, CHANGE = 1000, 0x5555_0000_AAAA_0000


@dataclass(frozen=True)
class Ring:
    """What runs.

    Attributes:
        rows: of ``words`` of eight bytes each.
        stages: of the ring.
    """

    rows: int = 5
    words: int = 6
    stages: int = 2

    @property
    def size(self) -> int:
        """How many times 30 words."""
        return max(1, self.rows * self.words // 30)


def machine_of(kind: str, seed: int) -> Machine:
    """A machine whose habits follow from the seed."""
    choose = random.Random(f"habits of copies {seed}")
    model = Weak(stale=choose.choice((0.2, 0.5, 0.9)), lag=choose.choice((0.0, 0.01)))
    return Machine(
        seed,
        model if kind == "weak" else Sequential(),
        burst=choose.choice((0.05, 0.3, 0.8)),
        parting=choose.choice((0.0, 0.05, 0.2)),
        copy_share=choose.choice((0.05, 0.2, 0.6)),
    )


def play(ring: Ring, kind: str, gpu: str, seed: int, edit: Edit = unchanged) -> str:
    """Rank 0 writes rows, rank 1 moves them, rank 0 reads what has come; the digest of all steps.

    Raises what is wrong: AssertionError where other bytes arrive.
    """
    machine = machine_of(kind, seed)
    weak = machine.memory.every_access
    give, move, take = (kernel(name, gpu, weak, ring.stages, edit) for name in ("give", "move", "take"))
    count = ring.rows * ring.words
    rows, moved, out, flags = memory(count), memory(count), memory(count), memory(16)
    for name, array in (("rows", rows), ("moved", moved), ("out", out), ("flags", flags)):
        machine.memory.register(name, array.ctypes.data, array.nbytes)
    given, told = flags.ctypes.data, flags.ctypes.data + 64
    start, target = rows.ctypes.data, moved.ctypes.data
    shared = ring.stages * ring.words * 8
    machine.launch_later(0, give, (1,), [start, count, SEED, given])
    machine.launch_later(1, move, (1,), [start, target, ring.rows, ring.words, CHANGE, given, told], shared)
    machine.launch_later(0, take, (1,), [target, count, out.ctypes.data, told])
    machine.run(limit_steps=LIMIT_STEPS * ring.size)
    expected = np.arange(SEED, SEED + count, dtype=np.uint64) ^ np.uint64(CHANGE)
    assert out.tolist() == moved.tolist() == expected.tolist(), f"seed {seed}: other bytes"
    return machine.digest()


def play_sum(ring: Ring, kind: str, gpu: str, seed: int, edit: Edit = unchanged) -> str:
    """Rows that are there before are summed; the digest of all steps."""
    machine = machine_of(kind, seed)
    rows, out = memory(ring.rows * ring.words), memory(ring.words)
    rows[:] = np.arange(len(rows), dtype=np.uint64) * np.uint64(SEED)
    for name, array in (("rows", rows), ("out", out)):
        machine.memory.register(name, array.ctypes.data, array.nbytes)
    arguments = [rows.ctypes.data, out.ctypes.data, ring.rows, ring.words]
    code = kernel("sum", gpu, machine.memory.every_access, ring.stages, edit)
    machine.launch_later(0, code, (1,), arguments, ring.stages * ring.words * 8)
    machine.run(limit_steps=SUM_STEPS * ring.size)
    assert out.tolist() == rows.reshape(ring.rows, ring.words).sum(0).tolist(), f"seed {seed}: another sum"
    return machine.digest()
