"""A model folder on disk: what stands in it, what is checked, how it is read and written."""
