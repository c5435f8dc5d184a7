"""The sticky error of a rank in words: which exception says what stopped its kernels."""

from __future__ import annotations

from typing import NamedTuple

from ..errors import (
    REBUILD_GROUP,
    PeerLost,
    PeerTimeout,
    ProtocolError,
    ProxyDied,
    TransportError,
    UcclEpError,
    after_loss,
    after_silence,
)
from ..protocol import context as ctx
from ..protocol.layout import is_plan, plan_in_words
from ..protocol.message import CODING_MARK, coding_in_words
from ..protocol.streams import channel_of, name_of

__all__ = ["StickyError"]


class StickyError(NamedTuple):
    """The words of the sticky error.

    Attributes:
        code: FAILURE_* of ``protocol.context``.
        peer, stream: whom and which stream it concerns, -1 for none.
        arrived, expected: what else there is to say; the meaning depends on the code.
    """

    code: int
    peer: int
    stream: int
    arrived: int
    expected: int

    @property
    def mismatch(self) -> str:
        """What is wrong, in words, when low-latency operations of different shapes or codings met; else empty."""
        if self.code != ctx.FAILURE_PROTOCOL:
            return ""
        theirs, mine = coding_in_words(self.arrived), coding_in_words(self.expected)
        if theirs and mine:
            return (
                f"rank {self.peer} sent {theirs} on {name_of(self.stream)}, and this rank {mine}. Likely cause: the "
                "ranks gave different dtypes, use_fp8, use_ue8m0 or topk_weights"
            )
        if not (is_plan(self.arrived) and is_plan(self.expected)):
            return ""
        return (
            f"rank {self.peer} sent an operation of another shape on {name_of(self.stream)}: "
            f"{plan_in_words(self.arrived)}. That of this rank has {plan_in_words(self.expected)}. Likely cause: the "
            "ranks made different calls, or the same with other sizes or dtypes"
        )

    def exception(self, phase: str, where: str, timeout: float) -> UcclEpError:
        """What to raise.

        Args:
            phase: the operation, in words.
            where: the same with the rank.
            timeout: seconds that a wait may last.
        """
        code, peer, stream, arrived, expected = self
        on = f" on {name_of(stream)}" if stream >= 0 else ""
        channel = channel_of(stream) if stream >= 0 else -1
        if code == ctx.FAILURE_PEER_LOST:
            return PeerLost(
                f"{where}: rank {peer} is lost (its process died, its connection closed, or another rank masked it). "
                f"{after_loss(peer)}",
                peer=peer,
                phase=phase,
                channel=channel,
            )
        if code == ctx.FAILURE_PEER_TIMEOUT:
            return PeerTimeout(
                f"{where}: rank {peer} is silent{on}: {arrived} messages or rows arrived, {expected} expected within "
                f"{timeout:g} s (UCCL_EP_TIMEOUT). Likely cause: rank {peer} has not made the same call, is slow to "
                f"start, is stuck, or the network drops its traffic. {after_silence(peer)}",
                peer=peer,
                phase=phase,
                channel=channel,
                arrived=arrived,
                expected=expected,
            )
        if code == ctx.FAILURE_PROXY_DIED:
            return ProxyDied(
                f"{where}: proxy thread {arrived} of this rank died. Close this Buffer and build another one"
            )
        if self.mismatch:
            return ProtocolError(f"{where}: {self.mismatch}. {REBUILD_GROUP}", peer=peer, channel=channel)
        if code == ctx.FAILURE_PROTOCOL:
            if min(arrived, expected) > 0 and arrived & expected & CODING_MARK:
                arrived, expected = arrived & ~CODING_MARK, expected & ~CODING_MARK
            return ProtocolError(
                f"{where}: rank {peer} sent what the formats forbid{on}: got {arrived:#x}, expected {expected:#x}. "
                "Likely cause: ranks run different versions, or were given different shapes, dtypes or options",
                peer=peer,
                channel=channel,
            )
        if code == ctx.FAILURE_COMMAND:
            return ProtocolError(
                f"{where}: a kernel of this rank was about to write to rank {peer}{on} up to byte {arrived} of a "
                f"window of {expected} bytes. Nothing of it was sent; rank {peer} loses the connection to this rank, "
                "so that the operation ends there too. Likely cause: memory was overwritten. Next step: close this "
                "Buffer; the other ranks go on without this one",
                peer=peer,
                channel=channel,
                own=True,
            )
        if code == ctx.FAILURE_RING_FULL:
            return TransportError(
                f"{where}: the proxy of {name_of(stream)} has taken {arrived} commands, {expected} needed "
                f"within {timeout:g} s. Likely cause: its thread gets no core, or the network takes nothing. Next "
                "step: UCCL_EP_PROXY_CPUS, and the counters that Buffer.stats() returns"
            )
        if code == ctx.FAILURE_LAYOUT:
            return PeerTimeout(
                f"{where}: rank {peer} asked for other windows while kernels of this rank waited for it, and has given "
                "up by now. Likely cause: the ranks made different calls, or the same with other sizes. "
                f"{after_silence(peer)}",
                peer=peer,
                phase=phase,
                channel=channel,
                arrived=arrived,
                expected=expected,
            )
        if code == ctx.FAILURE_TRANSPORT:
            return TransportError(f"{where}: the transport to rank {peer} failed{on}, status {arrived}", status=arrived)
        if code == ctx.FAILURE_CLAIMED:
            return UcclEpError(
                f"{where}: a thread of this rank set the sticky error and has not said why. Likely cause: it gets no "
                f"core, or died in between. {REBUILD_GROUP}"
            )
        return UcclEpError(f"{where}: this Buffer is closed")
