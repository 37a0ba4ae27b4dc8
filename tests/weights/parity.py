"""Does a published network compute the same here? One table of cases, each a source's own program with random weights.

A case writes the source's file or folder and computes its logits; `test_parity.py` loads what was written and compares,
as `vitral.testing` does for formats of other packages. A format of `vitral.weights.formats.FORMATS` without a case here
fails the suite. Cases live in `cases_*.py`.
"""

from __future__ import annotations

from vitral.testing.formats import Case, Size, randomized

__all__ = ["Case", "Size", "randomized"]
