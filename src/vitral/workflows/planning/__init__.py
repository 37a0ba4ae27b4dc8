"""Plan a run: every choice that the user left open, from the data, the machine and the options."""
