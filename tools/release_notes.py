"""Check that a tag fits the version and the changelog, and write the release's notes.

python tools/release_notes.py v0.1.0 --out notes.md
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSION = ROOT / "src/vitral/_version.py"
CHANGELOG = ROOT / "CHANGELOG.md"


class RefusedError(Exception):
    """A tag that cannot be released."""


def notes(tag: str, version: str, changelog: str) -> str:
    """Return the section of the changelog for a tag."""
    if tag != f"v{version}":
        raise RefusedError(f"the tag is {tag}, the version {version}: set __version__ in {VERSION.relative_to(ROOT)}")
    sections = dict(re.findall(r"^## (.+)\n((?:(?!## ).*\n?)*)", changelog, re.MULTILINE))
    title = next((title for title in sections if title.split(" ")[0] == version), None)
    if title is None:
        raise RefusedError(f"CHANGELOG.md has no section {version}")
    if not re.fullmatch(rf"{re.escape(version)} \(\d{{4}}-\d\d-\d\d\)", title):
        raise RefusedError(f"CHANGELOG.md has “## {title}”: write the date, as “## {version} (2026-12-31)”")
    if not (text := sections[title].strip()):
        raise RefusedError(f"the section {version} of CHANGELOG.md is empty")
    return text + "\n"


def main() -> int:
    """Write the notes; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("tag")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    version = re.findall(r'__version__ = "(.+)"', VERSION.read_text("utf-8"))[0]
    try:
        given.out.write_text(notes(given.tag, version, CHANGELOG.read_text("utf-8")), "utf-8")
    except RefusedError as error:
        print(f"No release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
