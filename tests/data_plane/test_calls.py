"""Ranks that are in operations of different modes find out; ranks that are not are left alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from uccl_ep_serving.data_plane.calls import Calls


class Mesh:
    """Delivers to the calls of the other rank."""

    def __init__(self, rank: int) -> None:
        self.rank, self.ranks = rank, 2
        self.on_doing: Any = None
        self.other: Mesh | None = None
        self.told = 0
        self.liveness = SimpleNamespace(masked=frozenset())

    def tell_doing(self, peer: int, what: bytes) -> None:
        self.told += 1
        assert self.other is not None
        assert peer == self.other.rank
        self.other.on_doing(self.rank, what)


def of_two() -> tuple[Calls, Calls, list[Mesh]]:
    """The calls of ranks 0 and 1."""
    meshes = [Mesh(0), Mesh(1)]
    meshes[0].other, meshes[1].other = meshes[1], meshes[0]
    return Calls(meshes[0]), Calls(meshes[1]), meshes  # type: ignore[arg-type]


def begin(one: Calls, modes: str, epoch: int = 3, begun: int = 0) -> None:
    """Dispatches of low latency (``l``), its combines (``c``) and normal mode (``n``), after ``begun`` ones."""
    for number, mode in enumerate(modes, begun + 1):
        one.begin(epoch, number, mode in "lc", mode == "c")


def tell(*of: Calls) -> None:
    for _ in range(4):
        for one in of:
            one.tell()


def test_both_ranks_are_told_whoever_changed() -> None:
    """Rank 0 goes on in its mode and says nothing of its own; it answers rank 1, which changed."""
    zero, one, meshes = of_two()
    begin(zero, "l" * 8)
    begin(one, "l" * 7 + "n")
    tell(zero, one)
    where = " (operation 8 of epoch 3)"
    assert zero.difference(3) == (
        1,
        "rank 1 is in an operation of normal mode, and this rank in a low-latency operation" + where,
    )
    assert one.difference(3) == (
        0,
        "rank 0 is in a low-latency operation, and this rank in an operation of normal mode" + where,
    )
    assert max(mesh.told for mesh in meshes) <= 3, "a peer that is stopped must not be written to without end"


def test_a_host_far_ahead_of_its_kernels_is_told_of_the_operation_in_which_they_wait() -> None:
    zero, one, _ = of_two()
    begin(zero, "l" * 10 + "n")
    begin(one, "l" * 10 + "l" * 900)
    tell(zero, one)
    for rank, of in enumerate((zero, one)):
        peer, words = of.difference(3)
        assert peer == 1 - rank
        assert words.endswith("(operation 11 of epoch 3)")


@given(st.data())
def test_the_first_operation_that_differs_is_found_exactly(data: Any) -> None:
    """Whatever ranks begin, how far one is ahead, and when they tell."""
    same = data.draw(st.text("ln", max_size=40))
    rest = [data.draw(st.text("ln", max_size=20)) for _ in range(2)]
    zero, one, _ = of_two()
    begun = [0, 0]
    for rank in data.draw(st.permutations([turn for turn in (0, 1) for _ in same + rest[turn]])):
        begin((zero, one)[rank], (same + rest[rank])[begun[rank]], begun=begun[rank])
        begun[rank] += 1
        if data.draw(st.booleans()):
            (zero, one)[rank].tell()
    tell(zero, one)
    both = [same + each for each in rest]
    number = next((at for at, pair in enumerate(zip(*both, strict=False), 1) if pair[0] != pair[1]), 0)
    for of in (zero, one):
        _, words = of.difference(3)
        assert words.endswith(f"(operation {number} of epoch 3)") if number else words == ""


@pytest.mark.parametrize(("epoch", "modes"), [(3, "nnl"), (3, "nnll"), (3, "nn"), (4, "lll")])
def test_ranks_that_make_the_same_calls_at_other_times_are_left_alone(epoch: int, modes: str) -> None:
    zero, one, _ = of_two()
    begin(zero, "nnl")
    begin(one, modes, epoch)
    tell(zero, one)
    assert [of.difference(number)[1] for of in (zero, one) for number in (3, 4)] == [""] * 4


def test_what_was_begun_in_an_earlier_epoch_counts_for_nothing() -> None:
    zero, one, _ = of_two()
    begin(zero, "l")
    begin(one, "n")
    tell(zero, one)
    assert zero.difference(3)[0] == 1
    assert zero.difference(4) == (-1, "")
    begin(zero, "l", 4)
    begin(one, "l", 4)
    tell(zero, one)
    assert (zero.difference(4), one.difference(4)) == ((-1, ""), (-1, ""))


def test_nothing_is_said_without_a_change_and_a_masked_peer_counts_for_nothing() -> None:
    zero, one, meshes = of_two()
    begin(zero, "lllll")
    tell(zero)
    assert meshes[0].told == 1
    for number in range(5, 9):
        begin(zero, "l", begun=number)
        zero.tell()
    assert meshes[0].told == 1
    begin(one, "n")
    meshes[1].liveness.masked = frozenset({0})
    assert one.difference(3) == (-1, "")


def test_who_stands_in_a_call_that_another_rank_has_left_out_is_told() -> None:
    """Rank 0 has lost a combine to an error that somebody caught, and dispatches again; rank 1 waits in its combine."""
    zero, one, meshes = of_two()
    begin(zero, "lclcl" + "l")
    begin(one, "lclcl" + "c")
    zero.tell()
    one.tell()
    assert [mesh.told for mesh in meshes] == [1, 1]
    four, three = "4 low-latency dispatches and 2 combines", "3 low-latency dispatches and 3 combines"
    assert one.difference(3)[1].startswith(f"rank 0 has begun {four}, and this rank {three} (in epoch 3)")
    assert zero.difference(3)[1].startswith(f"rank 1 has begun {three}, and this rank {four} (in epoch 3)")


@given(st.data())
def test_ranks_whose_calls_are_the_same_are_left_alone_wherever_they_stand(data: Any) -> None:
    same = data.draw(st.text("lcn", max_size=30))
    zero, one, _ = of_two()
    for of in (zero, one):
        for number in range(data.draw(st.integers(0, len(same)))):
            begin(of, same[number], begun=number)
            if data.draw(st.booleans()):
                of.tell()
        tell(zero, one)
    assert zero.difference(3) == one.difference(3) == (-1, "")


def test_low_latency_is_told_once_where_it_stands_and_normal_mode_never() -> None:
    """A host of normal mode waits in each operation for what its peers have to say."""
    for mode, told in (("l", 2), ("n", 1)):
        zero, _, meshes = of_two()
        begin(zero, mode)
        zero.tell()
        begin(zero, mode, begun=1)
        tell(zero)
        assert meshes[0].told == told


def test_what_is_no_operation_ends_the_connection() -> None:
    mesh = of_two()[2][0]
    for payload in (b"", b"\x93\x01\x02", b"\xc0" * 40, msgspec.msgpack.encode((0, 1, bytes(129), 0, 0))):
        with pytest.raises(ValueError, match="rank 1 sent a malformed control frame"):
            mesh.on_doing(1, payload)


def test_numbers_that_no_rank_reaches_are_harmless() -> None:
    zero, _, meshes = of_two()
    begin(zero, "lnln")
    for begun in (-(2**63), -1, 0, 2**64 - 1):
        meshes[0].on_doing(1, msgspec.msgpack.encode((3, begun, b"\xff" * 128, begun, 0)))
        zero.tell()
        assert zero.difference(3)[0] in (-1, 1)
