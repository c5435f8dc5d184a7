"""Memory of the fake network: words of the fabric, of an endpoint and of a write in flight, as byte offsets."""

from __future__ import annotations

__all__ = [
    "ENDPOINT_BLOCKED",
    "ENDPOINT_BYTES",
    "ENDPOINT_DROPPED",
    "ENDPOINT_FABRIC",
    "ENDPOINT_INBOX",
    "ENDPOINT_INBOX_COUNT",
    "ENDPOINT_INJECTED",
    "ENDPOINT_INJECTED_COUNT",
    "ENDPOINT_OUTBOX",
    "ENDPOINT_OUTBOX_COUNT",
    "ENDPOINT_PARTED",
    "ENDPOINT_POLLS",
    "ENDPOINT_PROXY",
    "ENDPOINT_RANK",
    "ENDPOINT_TOLD",
    "ENDPOINT_UNDER_WAY",
    "FABRIC_ALIVE",
    "FABRIC_BUSY",
    "FABRIC_BYTES",
    "FABRIC_DELAY",
    "FABRIC_DEPTH",
    "FABRIC_DROP",
    "FABRIC_DUPLICATE",
    "FABRIC_FLIGHTS",
    "FABRIC_FREE",
    "FABRIC_KILL",
    "FABRIC_KILL_AFTER",
    "FABRIC_LINGER",
    "FABRIC_LOCK",
    "FABRIC_LOSE",
    "FABRIC_POSTED",
    "FABRIC_PROVES",
    "FABRIC_PROXIES",
    "FABRIC_RANDOM",
    "FABRIC_RANKS",
    "FABRIC_REORDER",
    "FABRIC_TABLE",
    "FABRIC_TOP",
    "FABRIC_WINDOWS",
    "FLIGHT_BYTES",
    "FLIGHT_CONTEXT",
    "FLIGHT_HOLDERS",
    "FLIGHT_IMM",
    "FLIGHT_LOCAL",
    "FLIGHT_NBYTES",
    "FLIGHT_PEER",
    "FLIGHT_SOURCE",
    "FLIGHT_STAGE",
    "FLIGHT_TARGET",
    "FLIGHT_WR",
    "HALF",
    "INJECTED_LIMIT",
    "LANDED",
    "LOST",
    "OVER",
    "SEEN",
]

# Fabric words (byte offsets). LOCK: 1 = taken (compare-and-exchange, release store). All others: under the lock.
# Probabilities are thresholds for 32 random bits.
(
    FABRIC_LOCK,
    FABRIC_RANKS,
    FABRIC_PROXIES,
    FABRIC_RANDOM,
    FABRIC_REORDER,
    FABRIC_DELAY,
    FABRIC_DUPLICATE,
    FABRIC_LINGER,
    FABRIC_BUSY,
    FABRIC_DROP,
    FABRIC_LOSE,
    FABRIC_KILL,
    FABRIC_KILL_AFTER,
    FABRIC_PROVES,
    FABRIC_DEPTH,
    FABRIC_WINDOWS,
    FABRIC_ALIVE,
    FABRIC_POSTED,
    FABRIC_TABLE,
    FABRIC_FLIGHTS,
    FABRIC_FREE,
    FABRIC_TOP,
) = range(0, 22 * 8, 8)
FABRIC_BYTES = 192

# Endpoint words. INBOX and OUTBOX: numbers of the writes to and from this endpoint, oldest first, depth x ranks each.
# BLOCKED: per source, the poll in which its later writes must wait. DROPPED, TOLD: per peer, 0 or 1. UNDER_WAY: per
# peer, writes to it that something still names. INJECTED: events. PARTED: per peer, 1 = it has dropped this endpoint.
(
    ENDPOINT_FABRIC,
    ENDPOINT_RANK,
    ENDPOINT_PROXY,
    ENDPOINT_INBOX,
    ENDPOINT_INBOX_COUNT,
    ENDPOINT_OUTBOX,
    ENDPOINT_OUTBOX_COUNT,
    ENDPOINT_BLOCKED,
    ENDPOINT_POLLS,
    ENDPOINT_DROPPED,
    ENDPOINT_TOLD,
    ENDPOINT_UNDER_WAY,
    ENDPOINT_INJECTED,
    ENDPOINT_INJECTED_COUNT,
    ENDPOINT_PARTED,
) = range(0, 15 * 8, 8)
ENDPOINT_BYTES = 128

# A write in flight. HOLDERS: lists that still name it; at 0 it is free, and SOURCE links the free ones.
(
    FLIGHT_CONTEXT,
    FLIGHT_SOURCE,
    FLIGHT_PEER,
    FLIGHT_LOCAL,
    FLIGHT_TARGET,
    FLIGHT_NBYTES,
    FLIGHT_IMM,
    FLIGHT_WR,
    FLIGHT_STAGE,
    FLIGHT_HOLDERS,
) = range(0, 10 * 8, 8)
FLIGHT_BYTES = 80
HALF, LANDED, SEEN, OVER, LOST = 1, 2, 4, 8, 16

INJECTED_LIMIT = 16
