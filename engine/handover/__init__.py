"""A sequence leaves one engine and goes on in another, with everything that was computed of it."""
