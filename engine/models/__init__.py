"""Model architectures and the files their weights come from."""
