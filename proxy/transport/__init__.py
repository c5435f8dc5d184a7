"""Transports: how writes and their immediates reach a peer. :mod:`.base` is the seam they all keep to."""
