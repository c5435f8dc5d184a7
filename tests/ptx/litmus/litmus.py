"""A litmus test: threads, where they are, and one outcome that PTX allows or forbids."""

from __future__ import annotations

from dataclasses import dataclass

#: placements of threads, as rank.CTA
CTAS = ("0.0", "0.1", "0.2", "0.3")
RANKS = ("0.0", "1.0", "2.0", "3.0")
ONE_CTA = ("0.0", "0.0", "0.0", "0.0")


@dataclass(frozen=True)
class Litmus:
    """One test.

    Attributes:
        threads: of each its instructions, as in PTX without type and state space: ``st.release.gpu f, 1``. ``f`` to
            ``z`` are locations of eight bytes (16 for ``.v2``), zero at first; ``a`` to ``e`` are registers; ``s`` is
            of shared memory. Bulk copies are of 16 bytes: ``copy.in s, x, m``, which tells the mbarrier ``m``, and
            ``copy.out x, s``.
        outcome: registers and final values of locations, in question: ``a=1 b=0``.
        allowed: whether PTX allows it.
        at: the place of each thread.
        beyond: why the model never reaches it though PTX allows it.
    """

    name: str
    threads: tuple[str, ...]
    outcome: str
    allowed: bool
    at: tuple[str, ...] = CTAS
    beyond: str = ""

    @property
    def copies(self) -> bool:
        """Whether there are bulk copies in it."""
        return any("copy." in thread for thread in self.threads)

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """Rank and CTA of each thread."""
        return tuple((int(place[0]), int(place[2])) for place in self.at[: len(self.threads)])

    @property
    def placement(self) -> str:
        """In words."""
        places = self.places
        if len(set(places)) == 1:
            return "one CTA"
        if len({rank for rank, _ in places}) == 1 and len(set(places)) == len(places):
            return "CTAs"
        if len({rank for rank, _ in places}) == len(places):
            return "ranks"
        letters = {place: "ABCD"[n] for n, place in enumerate(dict.fromkeys(places))}
        across = "of ranks" if len({rank for rank, _ in places}) > 1 else "of one rank"
        return f"CTAs {' '.join(letters[place] for place in places)}, {across}"


def table(tests: tuple[Litmus, ...]) -> str:
    """For the documentation: a row a test."""
    rows = ["| test | threads | where | outcome | PTX | here |", "|---|---|---|---|---|---|"]
    for test in tests:
        threads = " ‖ ".join(f"`{thread}`" for thread in test.threads)
        says = "allowed" if test.allowed else "forbidden"
        here = "never" if not test.allowed else f"never: {test.beyond}" if test.beyond else "reached"
        rows.append(f"| {test.name} | {threads} | {test.placement} | {test.outcome} | {says} | {here} |")
    return "\n".join(rows)
