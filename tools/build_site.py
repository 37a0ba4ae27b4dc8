"""Build the site of the documentation from the pages and the docstrings; a broken link or reference fails.

python tools/build_site.py build/docs
"""

from __future__ import annotations

import sys
from pathlib import Path

from sphinx.cmd.build import main

ROOT = Path(__file__).resolve().parents[1]

if __name__ == "__main__":
    out, root, *settings = [*sys.argv[1:], str(ROOT)] if len(sys.argv) == 2 else sys.argv[1:]
    code = main(["-W", "--keep-going", "-q", "-E", "-c", str(ROOT / "docs/site"), *settings, root, out])
    print(f"The site is in {out}: open {out}/index.html" if code == 0 else "Mend the pages that are named above")
    sys.exit(code)
