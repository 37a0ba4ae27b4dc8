"""Pretraining on images without labels: one file a method, and one table, `methods`."""
