"""Transports over NICs: what ``efa`` and ``roce`` share, and what is each one's own."""
