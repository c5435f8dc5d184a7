"""Litmus tests of the memory model: small programs whose outcomes PTX allows or forbids."""
