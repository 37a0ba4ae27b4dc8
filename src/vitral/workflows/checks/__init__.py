"""Checks of a labeled data set by a network: wrong labels, near-duplicates."""
