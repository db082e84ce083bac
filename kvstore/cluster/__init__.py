"""The cluster map: who stores what, and where a block belongs."""
