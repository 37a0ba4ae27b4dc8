"""Run the command line as `python -m vitral`, for shells that do not find `vitral`."""

import sys

from vitral.cli.main import main

sys.exit(main())
