"""Parts of a step between nodes as kernels of their own. Imported only where Triton is the interpreter."""

from __future__ import annotations

import triton
import triton.language as tl

from uccl_ep_serving.kernels.triton.context import is_live, own_rank
from uccl_ep_serving.kernels.triton.normal_node_step import _blame_node, _check_peers, _is_over
from uccl_ep_serving.kernels.triton.normal_nodes import is_far, is_rail
from uccl_ep_serving.kernels.triton.normal_open import _take_rows, begin_nodes, place_nodes
from uccl_ep_serving.kernels.triton.normal_relay import (
    choose_laid_out,
    choose_sums,
    note_taken,
    say_freed,
    say_taken,
    show,
    view,
)
from uccl_ep_serving.kernels.triton.normal_step import blame_peer, choose_rows, give_grants
from uccl_ep_serving.kernels.triton.words import clock_ns, int64s, poke, settle


@triton.jit
def lanes_of(context: tl.tensor, state: tl.tensor, LANES: tl.constexpr) -> tl.tensor:
    """(peers, those that are live and not this rank, of these the far ones, of these the rail peers)."""
    peers = tl.arange(0, LANES).to(tl.int64)
    live = is_live(context, peers) & (peers != own_rank(context))
    far = live & is_far(context, state, peers)
    return peers, live, far, far & is_rail(context, state, peers)


@triton.jit
def regrant(context: tl.int64, state: tl.int64, LANES: tl.constexpr, BACKEND: tl.constexpr) -> None:
    """A forwarder hears how far its node is, and grants what is free."""
    peers, _, _, rail = lanes_of(context, state, LANES)
    note_taken(context, state, peers, rail, BACKEND)
    settle(BACKEND)
    give_grants(context, state, peers, rail, clock_ns(BACKEND), LANES, BACKEND)


@triton.jit
def show_batches(context: tl.int64, state: tl.int64, LANES: tl.constexpr, BACKEND: tl.constexpr) -> None:
    """A forwarder shows what has arrived."""
    peers, _, _, rail = lanes_of(context, state, LANES)
    show(context, state, peers, rail, BACKEND)


@triton.jit
def look_at_boards(
    context: tl.int64, state: tl.int64, wanting: tl.int64, LANES: tl.constexpr, BACKEND: tl.constexpr
) -> None:
    """int64[LANES] ``wanting``: 1 for far ranks of which more must be shown first."""
    peers, _, far, _ = lanes_of(context, state, LANES)
    _, more = view(context, state, peers, far, BACKEND)
    tl.store(int64s(wanting + 8 * peers), more.to(tl.int64))


@triton.jit
def tell_taken(context: tl.int64, state: tl.int64, LANES: tl.constexpr, BACKEND: tl.constexpr) -> None:
    """A rank tells its forwarders how far it is."""
    peers, _, far, _ = lanes_of(context, state, LANES)
    say_taken(context, state, peers, far, BACKEND)


@triton.jit
def tell_freed(
    context: tl.int64, state: tl.int64, counts: tl.int64, LANES: tl.constexpr, BACKEND: tl.constexpr
) -> None:
    """A forwarder tells the ranks of its node which of their rows it has summed and sent."""
    peers, _, far, _ = lanes_of(context, state, LANES)
    say_freed(context, state, counts, peers, far, BACKEND)


@triton.jit
def make_room(context: tl.int64, state: tl.int64, LANES: tl.constexpr, BACKEND: tl.constexpr) -> None:
    """A rank decides what to lay out."""
    peers, _, far, _ = lanes_of(context, state, LANES)
    choose_laid_out(context, state, peers, far, BACKEND)


@triton.jit
def decide_sums(
    context: tl.int64, state: tl.int64, counts: tl.int64, LANES: tl.constexpr, BACKEND: tl.constexpr
) -> None:
    """A forwarder decides what to sum, and a rank what to pack for its own node."""
    peers, live, far, rail = lanes_of(context, state, LANES)
    choose_rows(context, state, peers, live & (far == 0), BACKEND)
    choose_sums(context, state, counts, peers, rail, BACKEND)


@triton.jit
def over(context: tl.int64, state: tl.int64, found: tl.int64, COMBINE: tl.constexpr, LANES: tl.constexpr) -> None:
    """int64[LANES] ``found``: 1 for peers with which nothing is left to be moved."""
    peers, live, _, _ = lanes_of(context, state, LANES)
    tl.store(int64s(found + 8 * peers), _is_over(context, state, peers, live, COMBINE).to(tl.int64))


@triton.jit
def check_all(
    context: tl.int64,
    state: tl.int64,
    counts: tl.int64,
    found: tl.int64,
    COMBINE: tl.constexpr,
    LANES: tl.constexpr,
    BACKEND: tl.constexpr,
) -> None:
    """What a step can do now; int64 ``found``: 1 when rows can be moved."""
    peers, live, _, _ = lanes_of(context, state, LANES)
    _, _, ready = _check_peers(context, state, counts, peers, live, clock_ns(BACKEND), COMBINE, LANES, BACKEND)
    poke(found, ready)


@triton.jit
def blame(
    context: tl.int64,
    state: tl.int64,
    counts: tl.int64,
    code: tl.int64,
    COMBINE: tl.constexpr,
    LANES: tl.constexpr,
    BACKEND: tl.constexpr,
) -> None:
    """A rank whose time is over names a rank of its node, where one is to blame."""
    peers, live, _, _ = lanes_of(context, state, LANES)
    _blame_node(context, state, counts, peers, live, code, COMBINE, BACKEND)


@triton.jit
def blame_any(context: tl.int64, state: tl.int64, code: tl.int64, LANES: tl.constexpr, BACKEND: tl.constexpr) -> None:
    """A rank whose time is over names a peer, and what of it is missing."""
    peers, live, _, _ = lanes_of(context, state, LANES)
    blame_peer(context, state, peers, live, code, BACKEND)


@triton.jit
def hear_rows(
    context: tl.int64,
    state: tl.int64,
    rows: tl.int64,
    rail_rows: tl.int64,
    KIND: tl.constexpr,
    LANES: tl.constexpr,
    BACKEND: tl.constexpr,
) -> None:
    """int64[LANES] of rows that the notifies tell of, and of rows over the rails."""
    peers, live, _, _ = lanes_of(context, state, LANES)
    told = tl.load(int64s(rows + 8 * peers), mask=live, other=0)
    told_rail = tl.load(int64s(rail_rows + 8 * peers), mask=live, other=0)
    _take_rows(context, state, peers, live, told, told_rail, KIND, True, BACKEND)


@triton.jit
def place_all(
    context: tl.int64,
    state: tl.int64,
    taken: tl.int64,
    passing: tl.int64,
    info: tl.int64,
    row: tl.int64,
    meta: tl.int64,
    KIND: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    """Where rows land."""
    begin_nodes(context, state, taken, passing, KIND, LANES)
    place_nodes(context, state, row, meta, 0, info, KIND, LANES)
