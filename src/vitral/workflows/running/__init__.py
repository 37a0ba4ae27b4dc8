"""Run a plan: build, train, save, restore, report."""
