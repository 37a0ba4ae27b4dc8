"""Implementations of the commands, one module each: from options to results on disk."""
