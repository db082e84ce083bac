"""Cauchy Reed-Solomon erasure code over GF(2^8): buffers in, buffers out, no I/O.

Start at `erasure.code.Code`. This package knows nothing of keys, nodes or networks.
"""
