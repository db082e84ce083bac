"""The agent of a compute host: one socket, one arena, and the processes that fill and empty it."""
