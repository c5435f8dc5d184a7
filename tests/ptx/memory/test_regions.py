"""Regions are kept by address, whatever is registered over what."""

from __future__ import annotations

import ctypes

from hypothesis import given
from hypothesis import strategies as st

from tests.ptx.memory.regions import Region, Regions

_SPACE = 64


@given(st.lists(st.tuples(st.integers(0, _SPACE - 1), st.integers(0, 24)), max_size=24), st.data())
def test_what_overlaps_is_forgotten(places: list[tuple[int, int]], data: st.DataObject) -> None:
    """Each newer region replaces all that it overlaps, and what is left is found by any of its addresses."""
    memory = ctypes.create_string_buffer(_SPACE + 32)
    base = ctypes.addressof(memory)
    regions, expected = Regions(), list[Region]()
    for number, (at, nbytes) in enumerate(places):
        new = Region(str(number), base + at, nbytes, watched=number % 2 == 0, fresh=False)
        over = [one for one in expected if nbytes and one.start < new.end and new.start < one.end]
        assert sorted(one.name for one in regions.add(new)) == sorted(one.name for one in over)
        expected = [one for one in expected if one not in over] + [new] * bool(nbytes)
        if expected and data.draw(st.booleans()):
            regions.remove(gone := expected.pop(data.draw(st.integers(0, len(expected) - 1))))
            assert gone not in list(regions)
        expected.sort(key=lambda one: one.start)
        assert list(regions) == expected
        assert regions.watched == [one for one in expected if one.watched]
        for one in expected:
            assert regions.at(one.end - 1, 1) is one
