"""Checks of a data set: defects, near-duplicates, groups, later changes."""
