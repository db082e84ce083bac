"""What an administrator runs: the `cachalot` command, and local clusters of real processes."""
