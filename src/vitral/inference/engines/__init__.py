"""Engines: other ways to compute the same network."""
