"""Memory of the compiled driver that feeds the tcp data path: one block of words, private to the fuzzing thread."""

from __future__ import annotations

from uccl_ep_serving.native.atomics import peek, poke
from uccl_ep_serving.native.jit import inlined
from uccl_ep_serving.protocol.frame import FRAME_BYTES, SEAL_BYTES

# --- given once: addresses, unless it is said otherwise ---------------------------------------------------------------
CONTEXT = 0  # of the endpoint
POLL, TAKE_OVER = 1, 2  # functions of its data path
WINDOW, WINDOW_BYTES = 3, 4
CANARY = 5  # bytes before and after the window that nobody may write
SHADOW = 6  # what window and canaries must hold, canary first
STREAM = 7  # a valid stream, and
WIRE = 8  # what is sent instead of it; ROOM bytes each
EVENTS = 9  # as polled
EXPECTED = 10  # as they must be
RNG = 11
AUTH = 12  # frames carry MACs (flag)
SENDER = 13  # a connection record that seals, and
SENDER_CONTEXT = 14  # the context it does it in
STRANGER = 15  # a connection record with another key
FRESH = 16  # the endpoint's records before a case: context, connections, peers, in a row
NOW = 17  # the same as they are, which lie apart: three addresses
NOW_LINKS, NOW_PEERS = 18, 19
LOOSE = 20  # by word of the context: 1 = it may change
BELL = 21  # an eventfd (descriptor)
PAIR = 22  # room for two descriptors
SCRATCH = 23  # room for a header
COUNTS = 24  # int64[kinds][COLUMNS]
CASE = 25  # address, where the number of the case is written before it begins
STARTS = 26  # int64[MOST_FRAMES]: where each frame of the stream starts

# --- of the present case ----------------------------------------------------------------------------------------------
KIND = 32
PEER = 33
FRAMES = 34  # frames of the valid stream
STREAM_BYTES, WIRE_BYTES = 35, 36
GENUINE = 37  # bytes of the stream that are sealed with the right key
NUMBER = 38  # of the first frame
ACKED, SENT = 39, 40  # frames of the other direction: known to have arrived, and sent
MENDED = 41  # a broken connection waits to be mended (flag); else its end is reported
CLOSES = 42  # the peer closes after the last byte (flag)
EVENT_COUNT, EXPECTED_COUNT = 43, 44
# what must be in the end
END_STATE, END_NUMBER, END_ACKED, END_STANDING = 45, 46, 47, 48
JUDGED = 49  # frames that the model has looked at
WRONG = 50  # one of WORDS, 0 = all is right
WRONG_AT = 51
REFUSED = 52  # the model has refused something (flag): what came is not what a peer sends
WORK_WORDS = 64

ROOM = 1 << 19
MOST_FRAMES = 64
MOST_EVENTS = 4096
COLUMNS = 4  # cases, refused, frames sent, frames judged
HEADER_ROOM = FRAME_BYTES + SEAL_BYTES

#: What can be wrong, by the number in WRONG.
WORDS = (
    "",
    "an event is not what it must be: WRONG_AT is its place",
    "there are more or fewer events than there must be: WRONG_AT is how many",
    "the window or a canary does not hold what it must",
    "the connection is not in the state in which it must be",
    "the number of the next frame is wrong",
    "the count of acknowledged frames is wrong",
    "the peer does not stand as it must",
    "a word of the context changed: WRONG_AT says which",
    "the record of another connection or peer changed",
    "what was posted changed",
    "the operating system gave no socket: WRONG_AT is its errno",
    "poll returned a negative status: WRONG_AT says which",
    "the connection still has work after so many polls",
)

(
    EVENT_DIFFERS,
    EVENTS_DIFFER,
    WINDOW_DIFFERS,
    STATE_DIFFERS,
    NUMBER_DIFFERS,
    ACKED_DIFFERS,
    STANDING_DIFFERS,
    CONTEXT_DIFFERS,
    OTHERS_DIFFER,
    POSTED_DIFFERS,
    NO_SOCKET,
    POLL_FAILED,
    NEVER_DONE,
) = range(1, len(WORDS))


@inlined
def get(work: int, word: int) -> int:
    """A word of the block."""
    return peek(work + 8 * word)


@inlined
def put(work: int, word: int, value: int) -> None:
    """Store a word of the block."""
    poke(work + 8 * word, value)
