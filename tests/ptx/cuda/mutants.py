"""Both kernels made wrong: each fence, wait, expectation, parity, group, order and scope taken out or weakened."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One change.

    Attributes:
        file: that is changed: of the ring, or a header of the product.
        before, after: the text that stands there once, and what is put for it.
        errors: of the model machine's, those that tell it.
    """

    name: str
    file: str
    before: str
    after: str
    errors: tuple[str, ...]

    def edit(self, name: str, text: str) -> str:
        """For :data:`tests.ptx.cuda.sources.Edit`."""
        if name != self.file:
            return text
        if text.count(self.before) != 1:
            raise ValueError(f"{self.name}: {self.before!r} stands {text.count(self.before)} times in {name}")
        return text.replace(self.before, self.after)


def _mutants(file: str, *rows: tuple[str, str, str, str]) -> tuple[Mutant, ...]:
    return tuple(Mutant(name, file, before, after, tuple(errors.split())) for name, before, after, errors in rows)


_EXPECT = "arrive_expect(&full[stage], bytes);"
_MADE = "    // all threads wait for phases of what one of them has made\n    __syncthreads();\n"
_SHARED = "fence.proxy.async.shared::cta;"

MBARRIERS = _mutants(
    "move.cu",
    ("the fence of mbarriers", "fence_mbarriers();", "", "BadMBarrier"),
    ("the barrier behind mbarriers", _MADE, "", "BadMBarrier"),
    ("an arrival too many is wanted", "make_mbarrier(&full[stage], 1);", "make_mbarrier(&full[stage], 2);", "NoEnd"),
    ("nobody arrives", _EXPECT, "", "NoEnd"),
    ("nothing is expected", _EXPECT, "arrive(&full[stage]);", "Uninitialised BadMBarrier DataRace"),
    (
        "sixteen bytes too few",
        _EXPECT,
        "arrive_expect(&full[stage], bytes - 16);",
        "BadMBarrier Uninitialised DataRace",
    ),
    ("sixteen bytes too many", _EXPECT, "arrive_expect(&full[stage], bytes + 16);", "NoEnd"),
    ("the other parity", "row / STAGES & 1);", "~(row / STAGES) & 1);", "Uninitialised DataRace"),
    ("one parity", "row / STAGES & 1);", "0);", "DataRace"),
    ("the wait for a phase", "wait_phase(&full[row % STAGES], row / STAGES & 1);", "", "Uninitialised DataRace"),
) + _mutants(
    "bulk.cuh",
    ("the acquire of a phase", "try_wait.parity.shared", "try_wait.parity.relaxed.cta.shared", "DataRace"),
)

FENCES = _mutants(
    "move.cu",
    ("the fence of shared memory", "fence_shared();", "", "DataRace"),
    ("the fence of the one alone that copies", "fence_shared();", "if (leads) fence_shared();", "DataRace"),
    (
        "the barrier before the copy out",
        "        fence_shared();\n        __syncthreads();",
        "fence_shared();",
        "DataRace",
    ),
    ("the fence of global memory", "fence_global();", "", "DataRace"),
) + _mutants(
    "bulk.cuh",
    ("of global memory for shared", _SHARED, "fence.proxy.async.global;", "DataRace"),
    ("of shared memory for global", '"fence.proxy.async.global;"', f'"{_SHARED}"', "DataRace"),
)

GROUPS = _mutants(
    "move.cu",
    ("the group", "commit();", "", "DataRace"),
    ("the wait before a slot is used again", "wait_read<1>();", "", "DataRace"),
    ("a wait for one group less", "wait_read<1>();", "wait_read<2>();", "DataRace"),
    ("the wait for what was stored", "wait_stores<0>();", "", "Unfinished DataRace"),
    ("a wait for reads only", "wait_stores<0>();", "wait_read<0>();", "DataRace"),
    ("the last group is not waited for", "wait_stores<0>();", "wait_stores<1>();", "Unfinished DataRace"),
)

WORDS = _mutants(
    "words.cuh",
    ("the release", "st.release.sys", "st.relaxed.sys", "DataRace"),
    ("the release to a peer", "st.release.sys", "st.release.gpu", "DataRace"),
    ("the acquire", "ld.acquire.sys", "ld.relaxed.sys", "DataRace"),
    ("the acquire from a peer", "ld.acquire.sys", "ld.acquire.gpu", "DataRace"),
) + _mutants(
    "move.cu",
    ("the wait for rows", "while (load_acquire_sys(given) == 0) {\n        }", "", "DataRace"),
    ("a release too early", "        wait_stores<0>();\n        store_release_sys(told, 1);",
     "store_release_sys(told, 1);\n        wait_stores<0>();", "DataRace"),
)  # fmt: skip

RING = MBARRIERS + FENCES + GROUPS + WORDS

_FREE = "arrive(&empty[stage]);"
#: Neither kernel misses the release of an arrival that expects bytes: the copies that follow it tell the same.
SUM = _mutants(
    "sum.cu",
    ("the wait for a free slot", "wait_phase(&empty[stage], round - 1 & 1);", "", "DataRace BadMBarrier"),
    ("the parity of free slots", "round - 1 & 1", "round & 1", "DataRace BadMBarrier NoEnd"),
    ("one of them says it for all", _FREE, f"if (lane == 0) {_FREE}", "NoEnd"),
    ("who says it first, waits for nobody", "make_mbarrier(&empty[stage], 32);", "make_mbarrier(&empty[stage], 1);",
     "DataRace BadMBarrier NoEnd"),
    ("nobody says it", _FREE, "", "NoEnd"),
    ("all threads copy", "if (is_elected()) {", "if (true) {", "BadMBarrier"),
) + _mutants(
    "bulk.cuh",
    ("the release of an arrival", "mbarrier.arrive.shared", "mbarrier.arrive.relaxed.cta.shared", "DataRace"),
    ("the acquire of a phase", "try_wait.parity.shared", "try_wait.parity.relaxed.cta.shared", "DataRace"),
)  # fmt: skip
