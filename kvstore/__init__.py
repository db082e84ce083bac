"""The block store: keys, layouts, cluster map, storage nodes and their client."""
