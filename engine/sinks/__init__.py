"""Where blocks and window state go to be kept: the agent of the host, or any store of blocks."""
