"""Window (SWA) state: a pool in the memory of each host, and a directory that says who has what.

Memory only, and soft state: nothing here ever touches a disk. The record, the rules of pool and
directory, and what is lost when: docs/formats/window.md.
"""
