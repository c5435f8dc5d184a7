"""Tests of what the host does around one operation."""
