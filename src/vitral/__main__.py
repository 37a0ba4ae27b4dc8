"""Run the command line as `python -m vitral`, for shells that do not find `vitral`."""

from vitral.cli.main import run

run()
