"""The command line: one module per family of commands, one table of commands in `main`."""
