"""Shared memory between an agent and the engines of one host, and how it is cut."""
