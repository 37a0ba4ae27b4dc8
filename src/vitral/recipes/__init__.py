"""Recipes: functions from the statistics of a data set to a complete run. `table` lists them."""
