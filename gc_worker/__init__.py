"""Keeps a storage node within its policy: TTL, LRU and watermarks, scrub, repair, policy sync."""
