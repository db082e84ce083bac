"""Decisions of an engine, pure: what a step computes, what waits, and what is given up."""
