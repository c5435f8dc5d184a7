"""Whole servers compared: one server line with another all-to-all each time, loaded by the engine's own client."""
