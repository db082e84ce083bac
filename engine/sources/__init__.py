"""Where prefixes come from: the agent of the host, or any store of blocks."""
