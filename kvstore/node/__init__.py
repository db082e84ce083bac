"""kvstored: the daemon on a storage node that keeps shards in segments of slots and serves them."""
