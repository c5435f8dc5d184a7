"""Recorded routing of real traffic, and what measurements on this machine advise for it."""
