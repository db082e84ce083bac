"""`make demo`: a real model and a real cluster on this machine, and what happens when it breaks."""
