"""`python -m vitral`, where the shell does not find `vitral`."""

import sys

from vitral.cli import main

sys.exit(main())
