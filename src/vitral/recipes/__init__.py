"""Recipes: short functions from the data's numbers to a complete run (`table`), the plan with its reasons (`planning`),
and carrying it out (`execute`)."""
