"""Metrics of the processes of this project: their form, and a small server for them."""
