"""Prefill and decode: runs a language model over blocks of KV cache that a store can keep."""
