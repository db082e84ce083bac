"""The process that serves an engine to clients on a socket, and what is said there."""
