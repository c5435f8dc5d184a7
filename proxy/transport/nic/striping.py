"""Which rail a stream takes: the rule that both ends of a stream follow without talking.

A rank's *rails* are its NICs, in an order of their own on each host; rail i of one rank talks to rail i of another (see
:mod:`uccl_ep_serving.data_plane.rails`). Channels of a peer are spread over the rails, and so are peers: with one
channel, a rank that writes to many peers still keeps all its NICs busy. Credits take the rail of the stream they
credit.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ....protocol.streams import STREAMS, channel_of

__all__ = ["rail_of", "stripe_table"]


def stripe_table(proxies: int) -> npt.NDArray[np.int64]:
    """int64[256]: by stream id, the number of its channel among those of the same proxy."""
    return np.array([channel_of(stream) // proxies for stream in range(STREAMS)], np.int64)


def rail_of(stripe: int, one: int, other: int, rails: int) -> int:
    """The rail of a stream between ranks ``one`` and ``other``, in whichever direction.

    Args:
        stripe: of the stream, from :func:`stripe_table`.
        one, other: EP ranks of the two ends.
        rails: that both ranks have, the smaller number of the two.
    """
    return (stripe + one + other) % rails
