"""Write the golden copies: `python -m tests.golden`, or with names, `python -m tests.golden help.txt api.txt`."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.golden.copies import COPIES, FOLDER, HASHES, make
from tests.golden.normal import as_json
from tests.golden.place import inside, prepare


def write(names: Sequence[str]) -> None:
    """Make these copies anew, or all of them; with all, files that are no longer in the table go."""
    if unknown := set(names) - COPIES.keys():
        raise SystemExit(f"no such copies: {', '.join(sorted(unknown))}; there are {', '.join(COPIES)}")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder).resolve()
        with inside(place):
            prepare()
        made = {name: make(name, place) for name in names or COPIES}
    for name, text in made.items():
        file = FOLDER / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(_with_other_cpus(file, text) if name == HASHES else text, "utf-8")
        print(f"{len(text):7,} characters  {name}")
    if not names:
        for file in FOLDER.rglob("*"):
            if file.is_file() and file.relative_to(FOLDER).as_posix() not in COPIES:
                file.unlink()


def _with_other_cpus(file: Path, text: str) -> str:
    """The hashes of this CPU beside those of others, unless its own have changed: then theirs are of other weights."""
    own = json.loads(text)
    before = json.loads(file.read_text("utf-8")) if file.exists() else {}
    changed = any(before.get(machine, hashes) != hashes for machine, hashes in own.items())
    return as_json(own if changed else {**before, **own})


if __name__ == "__main__":
    write(sys.argv[1:])
