"""Tests of recorded routing and of advice."""
