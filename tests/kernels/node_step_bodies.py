"""What the process of the tests of single steps between nodes runs, in Triton's interpreter."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch

from tests.support.interpreter import interpret
from uccl_ep_serving.control_plane.bootstrap import StoreExchange
from uccl_ep_serving.protocol import context as ctx
from uccl_ep_serving.protocol import relay
from uccl_ep_serving.protocol.message import DTYPE_BF16, GRANT_SLOTS, HEADER_BYTES, NormalGrant, NormalNotify
from uccl_ep_serving.protocol.streams import NORMAL_DISPATCH, NORMAL_GRANT, NORMAL_NOTIFY


def _modules() -> tuple[Any, Any]:
    interpret()
    from tests.kernels import node_stand, node_step_kernels

    return node_stand, node_step_kernels


# -- a dispatch, as the forwarder ---------------------------------------------------------------------------------


def regrant(exchange: StoreExchange) -> None:
    """Rank 2 forwards rows of rank 0 for itself and rank 3, in slots of four rows: two are granted, both full."""
    node_stand, kernels = _modules()
    with node_stand.standing(2) as stand:
        stand.set(0, RECV_ROWS=20, SLOT_ROWS=4, SLOT_STRIDE=4096, CHUNK_ROWS=4, GRANTED=2, SHOWN=1 + 8)

        def after(own: int, other: int) -> tuple[int, int]:
            stand.line(2, 0, 2)[relay.TAKEN], stand.line(2, 0, 3)[relay.TAKEN] = own, other
            stand.run(kernels.regrant)
            return int(stand.table("CONSUMED")[0]), int(stand.table("GRANTED")[0])

        stamp = node_stand.stamp
        # what an earlier operation says is nothing
        assert after(stamp(8), stamp(100, node_stand.OPERATION - 1)) == (0, 2)
        assert after(stamp(8), stamp(3)) == (3, 2)
        assert after(stamp(3), stamp(8)) == (3, 2)
        assert stand.grants_to(0) == [[0] * 8] * GRANT_SLOTS
        assert after(stamp(8), stamp(4)) == (4, 3)
        grant = stand.grants_to(0)[0]
        assert (grant[NormalGrant.ROUND], grant[NormalGrant.ROWS]) == (2, 4)
        # who is in a later operation needs nothing of this one
        assert after(stamp(8), stamp(0, node_stand.OPERATION + 1)) == (8, 4)


def show(exchange: StoreExchange) -> None:
    """Rank 2 shows what has arrived from rank 0: whole batches, and where rows lie before the first."""
    node_stand, kernels = _modules()
    with node_stand.standing(2) as stand:
        rounds = stand.layout.normal_rounds
        stand.set(0, RECV_ROWS=9, ROW_LANDING=rounds, META_LANDING=rounds + 4096, SLOT_ROWS=4, SLOT_STRIDE=8192)
        board = stand.board(2, 0)
        board[:6] = (node_stand.stamp(7, node_stand.OPERATION - 1), 1, 2, 3, 4, 5)
        shown = []
        for arrived, expected in ((0, 4), (3, 4), (4, 4), (8, 9), (9, 9)):
            stand.set(0, ARRIVED=arrived, EXPECTED=expected)
            stand.run(kernels.show_batches)
            shown.append(node_stand.rows_of(int(board[relay.ARRIVED])))
        assert shown == [0, 0, 4, 4, 9]
        assert board[1:6].tolist() == [9, rounds, rounds + 4096, 4, 8192]


def taken(exchange: StoreExchange) -> None:
    """Rank 3, of whose rows of ranks 0 and 1 it has got all: of rank 1 it must also keep the marks, as forwarder."""
    node_stand, kernels = _modules()
    with node_stand.standing(3) as stand:
        for far in (0, 1):
            stand.set(far, PASS_RECV=2, PASS_READY=2, VIEW_ROWS=9, VIEW_SLOT_ROWS=4, SCAN_END=4, RECV_ROWS=9 * far)
        own, other = stand.line(3, 0, 3), stand.line(2, 0, 3)
        stand.run(kernels.tell_taken)
        assert node_stand.rows_of(int(other[relay.TAKEN])) == relay.EVERYTHING
        assert node_stand.rows_of(int(own[relay.TAKEN])) == 4
        stand.set(1, SCAN_END=9)
        stand.run(kernels.tell_taken)
        assert node_stand.rows_of(int(own[relay.TAKEN])) == relay.EVERYTHING
        # of rank 0, with one row missing when all have been looked at, too few were marked
        stand.set(0, PASS_RECV=3, SCAN_END=9)
        stand.run(kernels.tell_taken)
        assert stand.failure == (ctx.FAILURE_PROTOCOL, 0)


def over(exchange: StoreExchange) -> None:
    """A forwarder is done when all of a rail peer's rows are shown, a rank when it has its own rows of each."""
    node_stand, kernels = _modules()
    with node_stand.standing(2) as stand:
        found = np.zeros(node_stand.LANES, dtype=np.int64)

        def left() -> list[int]:
            stand.run(kernels.over, found.ctypes.data, COMBINE=False)
            return [peer for peer in range(4) if not found[peer]]

        stand.set(0, RECV_ROWS=6, SCANNED=6, SHOWN=1 + 4, PASS_RECV=2, PASSED=2)
        stand.set(1, PASS_RECV=3, PASSED=2)
        assert left() == [0, 1]
        stand.set(0, SHOWN=1 + 6)
        stand.set(1, PASSED=3)
        assert left() == []
        stand.set(0, SCANNED=5)
        assert left() == [0]


# -- a dispatch, as any rank --------------------------------------------------------------------------------------


def old_board(exchange: StoreExchange) -> None:
    """What a board says of another operation is not looked at; what it says of this one is."""
    node_stand, kernels = _modules()
    with node_stand.standing(3) as stand:
        rounds = stand.layout.normal_rounds
        wanting = np.zeros(node_stand.LANES, dtype=np.int64)
        stand.set(0, PASS_RECV=2)
        board = stand.board(2, 0)
        for operation, expected in ((node_stand.OPERATION - 1, (0, 0)), (node_stand.OPERATION, (8, 4))):
            board[:6] = (node_stand.stamp(8, operation), 8, rounds, rounds + 4096, 4, 8192)
            stand.run(kernels.look_at_boards, wanting.ctypes.data)
            assert (stand.table("SCAN_END")[0], stand.table("VIEW_SLOT_ROWS")[0]) == expected
            assert wanting[:4].tolist() == [int(expected == (0, 0)), 0, 0, 0]
        assert stand.failure[0] == 0


def forged_board(exchange: StoreExchange, word: int, value: int) -> tuple[int, int]:
    """What rank 3 makes of a board of rank 2 of which one word is wrong: (code, peer)."""
    node_stand, kernels = _modules()
    with node_stand.standing(3) as stand:
        rounds = stand.layout.normal_rounds
        stand.set(0, PASS_RECV=2)
        words = stand.board(2, 0)
        words[:6] = (node_stand.stamp(3), 9, rounds, rounds + 4096, 4, 8192)
        if word == relay.ARRIVED:
            value = node_stand.stamp(value)
        words[word] = value
        stand.run(kernels.look_at_boards, np.zeros(node_stand.LANES, dtype=np.int64).ctypes.data)
        assert stand.table("SCAN_END")[0] == 0
        return stand.failure


def listed(exchange: StoreExchange) -> None:
    """Rank 3 finds its rows by their marks, no more than their source told of, and keeps marks while there is room."""
    node_stand, _ = _modules()
    from uccl_ep_serving.kernels.triton.normal_relay import list_passed

    marks = np.array([3, 1, 2, 2, 3, 1], dtype=np.uint8)
    with node_stand.standing(3) as stand:
        rounds = stand.layout.normal_rounds
        for far, via in ((0, 2), (1, 3)):
            for index, mark in enumerate(marks):
                at = rounds + index // 4 * 8192 + index % 4 * 16
                stand.window(via)[at] = mark
            stand.set(far, PASS_RECV=3 + far, SCAN_END=6, VIEW_ROWS=6, VIEW_META=rounds, VIEW_SLOT_ROWS=4)
            stand.set(far, VIEW_STRIDE=8192, RELAY_FIRST=0)
        lists = torch.full((4, 8), -1, dtype=torch.int32)
        kept = torch.zeros(8, dtype=torch.uint8)
        stand.run(list_passed, lists.data_ptr(), 8, kept.data_ptr(), 4, grid=4, USED=0, BLOCK=8)
        assert lists[:2].tolist() == [[0, 2, 3, -1, -1, -1, -1, -1], [0, 2, 3, 4, -1, -1, -1, -1]]
        assert stand.table("PASS_READY")[:2].tolist() == [3, 4]
        assert kept.tolist() == [*marks[:4].tolist(), 0, 0, 0, 0]
        # one list ends where the next begins
        lists.fill_(-1)
        stand.run(list_passed, lists.data_ptr(), 2, 0, 0, grid=4, USED=0, BLOCK=8)
        assert lists.view(-1)[:6].tolist() == [0, 2, 0, 2, -1, -1]
        assert stand.table("PASS_READY")[:2].tolist() == [2, 2]


def _launch_rows(stand: Any, kernel: Any, **given: Any) -> None:
    """A kernel that moves rows, in one program, with tensors or numbers for some of its arguments."""
    constants = {name: given.pop(name) for name in list(given) if name.isupper()}
    names = [name for name in kernel.arg_names if name.islower()][2:]
    values = [one.data_ptr() if isinstance(one, torch.Tensor) else one for one in (given.pop(n, 0) for n in names)]
    assert not given
    shape = {"HIDDEN": 0, "DTYPE": DTYPE_BF16, "SLOTS": 1, "TOPK": 0, "SCALE_WORDS": 0, "SCALES": 1}
    stand.run(kernel, *values, **{**shape, "ROWS": 8, "BLOCK": 8, **constants})


def _moved(stand: Any, **given: Any) -> None:
    """``move_node_rows``."""
    from uccl_ep_serving.kernels.triton.normal_node_step import move_node_rows

    _launch_rows(stand, move_node_rows, **given)


def passed_rows(exchange: StoreExchange, wrong: int) -> tuple[list[list[int]], int]:
    """Rank 3 of nodes with two local experts a rank takes two rows of rank 0, one of which names expert ``wrong`` of
    the node. Ids that it returns, and the rank that it holds to blame; -1: nobody."""
    node_stand, _ = _modules()
    from uccl_ep_serving.kernels.blocks.normal_device import BAD_PEER

    with node_stand.standing(3, row=32, meta=32) as stand:
        rounds = stand.layout.normal_rounds
        stand.set(0, PASS_READY=2, RECV_FIRST=1, VIEW_ROW=rounds, VIEW_META=rounds + 4096, VIEW_SLOT_ROWS=4)
        window = stand.window(2)
        for index, ids in ((1, (0, 2)), (3, (3, wrong))):
            window[rounds + 32 * index : rounds + 32 * (index + 1)] = index
            at = rounds + 4096 + 32 * index
            window[at : at + 8].view(np.int32)[:] = ids
            window[at + 8 : at + 16].view(np.float32)[:] = (0.5, 0.25)
        out, idx = torch.zeros(3, 32, dtype=torch.uint8), torch.full((3, 2), -2, dtype=torch.int64)
        weights = torch.zeros(3, 2)
        lists = torch.tensor([[1, 3]] + [[0, 0]] * 3, dtype=torch.int32)
        given = {"out": out, "out_idx": idx, "out_weights": weights, "capacity": 3, "local_experts": 2}
        _moved(stand, **given, passes=lists, pass_rows=2, KIND=node_stand.DISPATCH, WORDS=8, TOPK=2, SLOTS=2)
        assert out[:, 0].tolist() == [0, 1, 3]
        assert weights[1].tolist() == [0.0, 0.25]
        return idx[1:].tolist(), int(stand.words[BAD_PEER]) - 1


def owed(exchange: StoreExchange, nodes: bool, lanes: int) -> tuple[int, int]:
    """Rank 1 owes its rail peer, rank 3, a grant and waits for the completion of the one in whose slot it is written;
    nothing else is missing. Whom it names when the time is over: (code, peer)."""
    node_stand, _ = _modules()
    from uccl_ep_serving.kernels.blocks.normal_device import STEP
    from uccl_ep_serving.kernels.triton.normal_node_step import advance_nodes
    from uccl_ep_serving.kernels.triton.normal_step import advance

    with node_stand.standing(1) as stand:
        stand.hold(3)
        stand.words[STEP] = 0
        stand.set(3, RECV_ROWS=20, SLOT_ROWS=4, SLOT_STRIDE=4096, CHUNK_ROWS=4, GRANTED=2, GRANTS_SENT=GRANT_SLOTS)
        # this rank misses no row itself, and has kept all marks
        stand.set(3, CONSUMED=4, SHOWN=1, SCAN_END=20)
        stand.expire()
        if nodes:
            stand.run(advance_nodes, 0, COMBINE=False, PATIENCE=0, LANES=lanes)
        else:
            stand.run(advance, LANES=lanes)
        return stand.failure


def laggard(exchange: StoreExchange) -> tuple[tuple[int, int], tuple[int, int]]:
    """Rank 2 has all that it granted rank 0, of which rank 3 has taken four rows: (code, peer), (arrived, expected)."""
    node_stand, kernels = _modules()
    with node_stand.standing(2) as stand:
        # rank 0 may send more, and does: nobody keeps it
        stand.set(0, RECV_ROWS=20, SLOT_ROWS=4, GRANTED=2, ARRIVED=7, CONSUMED=4, SCAN_END=20)
        stand.line(2, 0, 2)[relay.TAKEN], stand.line(2, 0, 3)[relay.TAKEN] = node_stand.stamp(8), node_stand.stamp(4)
        stand.run(kernels.blame, 0, ctx.FAILURE_PEER_TIMEOUT, COMBINE=False)
        assert stand.failure[0] == 0
        stand.set(0, ARRIVED=8)
        stand.run(kernels.blame, 0, ctx.FAILURE_PEER_TIMEOUT, COMBINE=False)
        return stand.failure, stand.missed


def missing(exchange: StoreExchange) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Rank 1 waits for rows of rank 3, of which two chunks have come; and for a grant of rank 2, after one that it has
    used: (code, peer), (arrived, expected) of each."""
    node_stand, kernels = _modules()
    found = []
    for late in (True, False):
        with node_stand.standing(1, node_ranks=1) as stand:
            stand.set(2, SEND_ROWS=5, SENT=4, GRANTS_TAKEN=1)
            stand.arrive(2, NORMAL_GRANT, 1)
            if late:
                stand.set(3, RECV_ROWS=20, EXPECTED=12, ARRIVED=8)
                stand.arrive(3, NORMAL_DISPATCH, 2)
            stand.run(kernels.blame_any, ctx.FAILURE_PEER_TIMEOUT)
            found.append((stand.failure, stand.missed))
    return found


# -- a combine ----------------------------------------------------------------------------------------------------


def unread(exchange: StoreExchange) -> tuple[tuple[int, int], tuple[int, int]]:
    """Of five rows that rank 3 lays out for rank 0, rank 2 has read two: (code, peer), (arrived, expected). Of all
    five nothing is missing."""
    node_stand, kernels = _modules()
    counts = torch.zeros((6, 2), dtype=torch.int32)
    found = []
    for passed in (5, 2):
        with node_stand.standing(3, combine=True) as stand:
            stand.set(0, PASS_SEND=5, PASSED=passed)
            stand.run(kernels.blame, counts.data_ptr(), ctx.FAILURE_PEER_TIMEOUT, COMBINE=True)
            found.append((stand.failure, stand.missed))
    assert found[0][0][0] == 0
    return found[1]


def in_heap(exchange: StoreExchange) -> list[int]:
    """Two rows of rank 3 have come to rank 2: whether there is something to move, from rounds and from the heap."""
    node_stand, kernels = _modules()
    from uccl_ep_serving.kernels.blocks.normal_device import IN_HEAP

    counts, found = torch.zeros((6, 2), dtype=torch.int32), np.zeros(1, dtype=np.int64)
    ready = []
    with node_stand.standing(2, combine=True) as stand:
        stand.set(3, RECV_ROWS=2, SLOT_ROWS=4, GRANTED=1, ARRIVED=2, EXPECTED=2)
        for heap in (0, 1):
            stand.words[IN_HEAP] = heap
            stand.run(kernels.check_all, counts.data_ptr(), found.ctypes.data, COMBINE=True)
            assert stand.failure[0] == 0
            ready.append(int(found[0]))
    return ready


def room(exchange: StoreExchange) -> None:
    """Rank 3 lays rows for rank 0 out in a ring of two chunks, which rank 2 reads."""
    node_stand, kernels = _modules()
    with node_stand.standing(3, combine=True) as stand:
        held = 2 * (4096 // (64 + 16))
        stand.set(0, PASS_SEND=1000)
        line = stand.line(3, 0, 2)

        def ready(freed: int) -> int:
            line[relay.FREED] = freed
            stand.run(kernels.make_room)
            return int(stand.table("PASS_READY")[0])

        stamp = node_stand.stamp
        assert ready(stamp(900, node_stand.OPERATION - 1)) == held
        stand.set(0, PASSED=held)
        assert ready(stamp(0)) == held
        assert ready(stamp(5)) == held + 5
        # nobody can have read more than was laid out
        assert ready(stamp(900)) == 2 * held
        stand.set(0, PASS_SEND=held + 3)
        assert ready(stamp(5)) == held + 3


def sums(exchange: StoreExchange) -> None:
    """Rank 2 sums four tokens for rank 0, of which rank 3 has three rows."""
    node_stand, kernels = _modules()
    with node_stand.standing(2, combine=True) as stand:
        # after each token, rows of ranks 2 and 3
        counts = torch.tensor([[0, 0], [1, 1], [2, 1], [2, 2], [3, 3], [4, 3]], dtype=torch.int32)
        # half of the staging: one chunk of four
        stand.set(0, SEND_ROWS=5, GRANT_LEFT=5, GRANT_CHUNK=4)
        line = stand.line(2, 0, 3)

        def chosen(offered: int) -> int:
            line[relay.OFFERED] = offered
            stand.run(kernels.decide_sums, counts.data_ptr())
            return int(stand.table("PACK_ROWS")[0])

        stamp = node_stand.stamp
        assert chosen(stamp(100, node_stand.OPERATION - 1)) == 0
        assert chosen(stamp(2)) == 0
        assert chosen(stamp(3)) == 4


def freed(exchange: StoreExchange) -> None:
    """Rank 2 has sent two sums to rank 0 and packs three more: of rank 3's rows it is done with those of the two."""
    node_stand, kernels = _modules()
    with node_stand.standing(2, combine=True) as stand:
        counts = torch.tensor([[0, 0], [1, 1], [2, 1], [2, 2], [3, 3], [4, 3]], dtype=torch.int32)
        stand.set(0, SEND_ROWS=5, SENT=2, GRANT_LEFT=3, PACK_ROWS=3)
        stand.run(kernels.tell_freed, counts.data_ptr())
        assert node_stand.rows_of(int(stand.line(3, 0, 2)[relay.FREED])) == 1


def unkept(exchange: StoreExchange) -> None:
    """Five rows go to rank 0 and three to rank 4, and there was room for the marks of two: rank 3 has one row of the
    first two. What follows in memory belongs to others."""
    node_stand, kernels = _modules()
    from uccl_ep_serving.kernels.triton.normal_relay import count_marks

    with node_stand.standing(2, ranks=6, combine=True) as stand:
        marks = torch.tensor([1, 3, 255, 255, 255, 255, 255, 255], dtype=torch.uint8)
        counts = torch.full((16, 2), 1 << 20, dtype=torch.int32)
        stand.set(0, SEND_ROWS=5, RELAY_FIRST=0, GRANT_LEFT=5, GRANT_CHUNK=8)
        stand.set(4, SEND_ROWS=3, RELAY_FIRST=5, GRANT_LEFT=3, GRANT_CHUNK=8)
        stand.run(count_marks, marks.data_ptr(), 2, counts.data_ptr(), grid=6, BLOCK=8)
        # rows and one entry more, for either rail peer; node 1 is this one
        assert counts[:5].tolist() == [[0, 0], [1, 0], [2, 1], [1 << 20] * 2, [0, 0]]
        assert bool((counts[5:] == 1 << 20).all())

        def chosen(offered: int) -> list[int]:
            stand.line(2, 0, 3)[relay.OFFERED] = node_stand.stamp(offered)
            stand.run(kernels.decide_sums, counts.data_ptr())
            return [int(stand.table("PACK_ROWS")[peer]) for peer in (0, 4)]

        assert chosen(0) == [0, 3]
        assert chosen(1) == [5, 3]

        def read(sent: int) -> list[int]:
            stand.set(0, SENT=sent)
            stand.run(kernels.tell_freed, counts.data_ptr())
            return [node_stand.rows_of(int(stand.line(3, node, 2)[relay.FREED])) for node in (0, 2)]

        # what nobody sums needs no room
        assert read(1) == [0, relay.EVERYTHING]
        assert read(2) == [relay.EVERYTHING] * 2


def summed(exchange: StoreExchange, told: int = 3, kept: int = 3) -> tuple[list[float], int]:
    """Rank 3 of 3-rank nodes sums three tokens for rank 0 whose rows are (256, 1, 1), (-0), and (256, 1); itself it
    was ``told`` of that many, and the marks of the first ``kept`` were kept. The sums' first values, and the rank held
    to blame or -1."""
    node_stand, _ = _modules()
    from uccl_ep_serving.kernels.blocks.normal_device import BAD_PEER, KEPT

    with node_stand.standing(3, ranks=6, node_ranks=3, row=32, meta=16, combine=True) as stand:
        stand.words[KEPT] = kept
        layout = stand.layout
        rounds, held = layout.normal_rounds, 2 * (4096 // 48)
        counts = torch.tensor([[0, 0, 0], [1, 1, 1], [2, 1, 1], [3, 2, 1], [0, 0, 0]], dtype=torch.int32)
        stand.set(0, PACK_ROWS=3, PASS_SEND=told, GRANT_ROW=rounds, GRANT_META=rounds + 4096, GRANT_CHUNK=3)
        x = torch.tensor([[256.0], [-0.0], [256.0]]).expand(3, 16).bfloat16().contiguous()
        weights = torch.tensor([[0.5], [1.0], [2.0]])
        for rank, values in ((4, (1.0, 1.0)), (5, (1.0,))):
            # the ring for rank 0: rows, then their meta
            ring = layout.normal_send
            rows = stand.window(rank)[ring : ring + 32 * len(values)].view(np.int16).reshape(-1, 16)
            rows[:] = torch.tensor(values).bfloat16().view(torch.int16).numpy()[:, None]
            metas = stand.window(rank)[ring + 32 * held : ring + 32 * held + 16 * len(values)].view(np.float32)
            metas.reshape(-1, 4)[:, 0] = 0.125
        given = {"x": x, "tokens": 3, "weights": weights, "counts": counts}
        _moved(stand, **given, KIND=node_stand.COMBINE, WORDS=8, HIDDEN=16, TOPK=1)
        landed = stand.window(0)[rounds : rounds + 96].view(np.int16).copy()
        back = torch.from_numpy(landed).view(torch.bfloat16).float().view(3, 16)
        assert bool((back == back[:, :1]).all())
        metas = stand.window(0)[rounds + 4096 : rounds + 4096 + 48].view(np.float32).reshape(3, 4)
        if told == kept == 3:
            assert metas.tolist() == [[0.75, 0, 0, 0], [1.0, 0, 0, 0], [2.125, 0, 0, 0]]
        return back[:, 0].tolist(), int(stand.words[BAD_PEER]) - 1


# -- what an operation begins with --------------------------------------------------------------------------------


def heard(exchange: StoreExchange, first: bool, rail_rows: list[int]) -> tuple[int, int]:
    """Rank 2 hears of 5 rows of each peer, and of ``rail_rows``; a handle knows of 3 over its rail. (code, peer)."""
    node_stand, kernels = _modules()
    with node_stand.standing(2) as stand:
        rows = np.zeros(node_stand.LANES, dtype=np.int64)
        over = rows.copy()
        rows[:4], over[:4] = 5, rail_rows
        kind = node_stand.DISPATCH
        if not first:
            kind = node_stand.COMBINE
            for peer, near in enumerate((3, 0, 0, 5)):
                stand.set(peer, RECV_ROWS=near, PASS_RECV=5)
        stand.run(kernels.hear_rows, rows.ctypes.data, over.ctypes.data, KIND=kind)
        return stand.failure


def opened(exchange: StoreExchange) -> None:
    """Rank 2 opens a dispatch of which every peer has told. What a handle keeps of it says who sent how many rows,
    near ranks too, whoever carried them."""
    node_stand, _ = _modules()
    from uccl_ep_serving.kernels.blocks.normal_device import INFO_WORDS, NOTIFY_RECV, NOTIFY_STRIDE, PEER_INFO_WORDS
    from uccl_ep_serving.kernels.triton.normal_open import open_operation

    with node_stand.standing(2) as stand:
        told = {0: (7, 4), 1: (6, 0), 3: (5, 0)}
        for peer, (rows, rail_rows) in told.items():
            at = int(stand.words[NOTIFY_RECV])
            at += ((node_stand.OPERATION & 1) * stand.ranks + peer) * int(stand.words[NOTIFY_STRIDE])
            words = stand.window(2)[at : at + HEADER_BYTES].view(np.int64)
            words[NormalNotify.TAG], words[NormalNotify.NUMBER] = NormalNotify.TAG_VALUE, node_stand.OPERATION
            words[NormalNotify.ROWS], words[NormalNotify.RAIL_ROWS] = rows, rail_rows
            # all of them for the one expert here, most of them over the rail of another rank
            stand.window(2)[at + HEADER_BYTES : at + HEADER_BYTES + 4].view(np.int32)[0] = rows
            stand.arrive(peer, NORMAL_NOTIFY, 1)
        given = torch.tensor([3, 0, 2, 1])
        passing = torch.tensor([[2, 3, 2, 1], [-1] * 4])
        counts = torch.zeros(stand.ranks, dtype=torch.int32)
        number, rows_out = torch.zeros(1, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
        info = torch.zeros(INFO_WORDS + PEER_INFO_WORDS * stand.ranks + 1, dtype=torch.int64)
        handle = (number.data_ptr(), rows_out.data_ptr(), info.data_ptr())
        form = (1, 0, 0, 0, 0, 64, 16, 1, 1, stand.node_ranks, passing.data_ptr())
        stand.run(
            open_operation,
            *(given.data_ptr(), 0, counts.data_ptr(), 0, *handle, *form),
            KIND=node_stand.DISPATCH,
            NODES=True,
            RANKS=4,
        )
        assert stand.failure[0] == 0
        assert number.tolist() == [node_stand.OPERATION]
        assert rows_out.tolist() == [4, 0, 2, 5]
        assert passing.tolist() == [[2, 3, 2, 1], [7, 6, 2, 5]]
        assert int(info[-1]) == 7 + 6 + 5


def finished(exchange: StoreExchange) -> None:
    """The host of rank 2 has launched no step of a dispatch in which nobody has rows but for itself."""
    node_stand, _ = _modules()
    from uccl_ep_serving.kernels.blocks.normal_device import NUMBER, OPEN, RAN, STEP
    from uccl_ep_serving.kernels.triton.normal_node_step import finish_nodes

    with node_stand.standing(2, row=32, meta=0) as stand:
        stand.words[STEP] = 0
        stand.set(2, PACK_ROWS=3)
        for peer in (0, 1, 3):
            stand.set(peer, SHOWN=peer == 0, CHUNK_ROWS=1, SLOT_ROWS=1)
            stand.arrive(peer, NORMAL_NOTIFY, 2)
        x, out = torch.arange(3, dtype=torch.int32)[:, None].repeat(1, 8), torch.zeros(3, 8, dtype=torch.int32)
        lists = torch.arange(3, dtype=torch.int32).repeat(4, 1)
        in_rank = torch.tensor([[0, 0, 1, 0]] * 3, dtype=torch.uint8)
        tensors = {"x": x, "out": out, "lists": lists, "in_rank": in_rank, "tokens": 3, "capacity": 3}
        _launch_rows(stand, finish_nodes, **tensors, KIND=node_stand.DISPATCH, WORDS=8, PATIENCE=0)
        assert torch.equal(out, x)
        assert [int(stand.words[word]) for word in (OPEN, RAN, NUMBER)] == [0, 1, node_stand.OPERATION + 1]


def lists(exchange: StoreExchange) -> None:
    """Each token once to the rail peer of a node that has one of its ranks, to near ranks one by one."""
    _modules()
    from uccl_ep_serving.kernels.triton.launch import Launch, Variant
    from uccl_ep_serving.kernels.triton.routing import list_tokens

    ranks, size, me, tokens = 6, 3, 4, 11
    in_rank = torch.rand(tokens, ranks, generator=torch.Generator().manual_seed(3)) < 0.4
    rows, passing = torch.zeros(ranks, dtype=torch.int64), torch.zeros(ranks, dtype=torch.int64)
    found = torch.full((ranks, tokens), -1, dtype=torch.int32)
    places = torch.full((tokens, ranks), -2, dtype=torch.int32)
    arguments = (in_rank.data_ptr(), tokens, ranks, me, size)
    outputs = (rows.data_ptr(), passing.data_ptr(), found.data_ptr(), places.data_ptr())
    Launch(Variant(list_tokens, {"NODES": True, "BLOCK": 4}), (ranks, 1, 1), (*arguments, *outputs)).run()
    for rank in range(ranks):
        near = in_rank[:, rank]
        expected = near
        if rank // size != me // size:
            to_node = in_rank[:, rank // size * size : rank // size * size + size].any(dim=1)
            expected = to_node if rank % size == me % size else torch.zeros_like(near)
        assert passing[rank] == near.sum()
        assert found[rank, : rows[rank]].tolist() == expected.nonzero()[:, 0].tolist()
        assert places[:, rank].tolist() == [
            int(expected[:token].sum()) if expected[token] else -1 for token in range(tokens)
        ]


def placed(exchange: StoreExchange, ranks: int, node_ranks: int, combine: bool, heap: bool) -> None:
    """Of each source the rows and meta that may land before any is consumed lie apart, inside the landing area."""
    node_stand, kernels = _modules()
    from uccl_ep_serving.kernels.blocks.normal_device import HEAP_BYTES, INFO_WORDS

    row, meta = 96, 16
    with node_stand.standing(1, ranks, node_ranks, row=row, meta=meta, combine=combine) as stand:
        if not heap:
            stand.words[HEAP_BYTES] = 0
        peers = [peer for peer in range(ranks) if peer != 1]
        linked = [peer for peer in peers if peer // node_ranks == 0 or peer % node_ranks == 1]
        for peer in linked:
            stand.set(peer, RECV_ROWS=3 + 5 * peer)
        taken, passing = torch.zeros(ranks, dtype=torch.int64), torch.zeros(2, ranks, dtype=torch.int64)
        info = torch.zeros(INFO_WORDS, dtype=torch.int64)
        kind = node_stand.COMBINE if combine else node_stand.DISPATCH
        arguments = (taken.data_ptr(), passing.data_ptr(), info.data_ptr(), row, meta)
        stand.run(kernels.place_all, *arguments, KIND=kind)
        ranges = []
        for peer in linked:
            get = {name: int(stand.table(name)[peer]) for name in ("ROW_LANDING", "META_LANDING", "SLOT_ROWS")}
            stride, rows = int(stand.table("SLOT_STRIDE")[peer]), int(stand.table("RECV_ROWS")[peer])
            whole = heap and (combine or peer < node_ranks)
            assert get["SLOT_ROWS"] >= (rows if whole else 1)
            assert (stride == 0) == whole
            assert get["SLOT_ROWS"] % stand.table("CHUNK_ROWS")[peer] == 0 or whole
            for slot in (0,) if whole else (0, 1):
                here = min(rows, get["SLOT_ROWS"])
                for name, each in (("ROW_LANDING", row), ("META_LANDING", meta)):
                    begin = get[name] + slot * stride
                    ranges.append((begin, begin + here * each))
        ranges.sort()
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ranges))
        landing_end = stand.layout.normal_heap + (64 << 10)
        assert stand.layout.normal_rounds <= ranges[0][0]
        assert ranges[-1][1] <= (landing_end if heap else stand.layout.normal_heap)
