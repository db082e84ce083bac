"""Moves sections of blocks between the arena of the host and an engine's pool."""
