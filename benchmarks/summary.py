"""Summarize results: speed relative to the other libraries, and whole runs, one line each.

Summaries follow from the captions and rows of the tables; nothing is measured here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.results import Result, Row, Table
from vitral.bench.report import VITRAL

LIBRARIES = ("timm", "transformers", "torchvision", "vit-pytorch")
SIZES = ("Ti", "S", "B", "L", "H")
_MEASURED = re.compile(r"(\S+) at (\d+)×\d+, (training step|inference|training from \S+), batch (\d+) ")
_SPEED = re.compile(r"([\d,.]+) s, [\d,.]+ (?:images|images)/s in training( on [^;(]*)?")
_THREADS = re.compile(r"(\d+) threads?")

LEGEND = """"×" is how many times as fast vitral is as another in the same run, by medians:

- *images/s*: vitral in eager mode; *of the matrix rate*: its FLOP/s relative to those of matrix products alone in the
  same rounds. The machine's speed varies, so a cell may exceed 100 %.
- *fastest other*: among the measured libraries, eager, at the same precision. "All four" are timm, transformers,
  torchvision and vit-pytorch, the last also with fused attention (vit-pytorch-flash).
- *compiled*: vitral under torch.compile; *either way*: the faster of the two against the fastest other library.
- *their default*: vitral against the fastest other library in fp32, their default.
- *int8*: vitral in int8 against the fastest other library in floats, by vitral's kernels and by OpenVINO.
- *whole runs*: views averaged is `vitral evaluate --tta`; seconds are training and validation, without reading data.

A line is a run; its command is on the page of the machine, its code is that of its commit ("+": with changes).
AMD's family 25 is Zen 3 (model 1) and Zen 4 (model 17), family 26 Zen 5."""
HEADLINES = ("S/16", "B/16")
"""Networks of the first page, at 224 pixels."""
SEEDS = 3
"""Minimum number of seeds of a whole run on the first page."""


def headlines(
    results: Sequence[Result], marks: Mapping[str, str], networks: Sequence[str] = HEADLINES, seeds: int = SEEDS
) -> str:
    """Make the first page: a few networks and whole runs on each machine, the most recent first."""
    found = {place: [one for one in results if one.place == place] for place in sorted({one.place for one in results})}
    parts = []
    for place in sorted(found, key=lambda place: (_last(found, place), len(found[place])), reverse=True):
        tables = [*_tables(found[place], networks, seeds)]
        if [table.caption for table in tables] == ["Whole runs"]:
            continue  # on one core, listed with more cores too
        parts += [f"### {place}"] if tables else []
        parts += [f"*{marks[place]}*"] if tables and place in marks else []
        parts += [f"**{table.caption}**\n\n{table.markdown()}" for table in tables]
    return "\n\n".join(["## In short", LEGEND, *parts]) + "\n" if parts else ""


def summary(results: Sequence[Result]) -> str:
    """Make the summary of one machine for all networks; empty if nothing was measured."""
    tables = [f"**{table.caption}**\n\n{table.markdown()}" for table in _tables(results)]
    return "\n\n".join(["## In short", LEGEND, *tables]) + "\n" if tables else ""


def _last(found: Mapping[str, Sequence[Result]], place: str) -> tuple[str, str]:
    """Return the last date of a CPU or GPU, with any number of cores, and its name."""
    name = place.rpartition(", ")[0] or place
    return max(one.date for there, ones in found.items() if there.startswith(name) for one in ones), name


def _tables(results: Sequence[Result], networks: Sequence[str] = (), seeds: int = 1) -> Iterator[Table]:
    """Make the tables of one machine: these networks or all, and whole runs with at least so many seeds."""
    lines = [line for one in results if one.program == "peers" for line in _contests(one)]
    lines = [line for line in lines if not networks or line["network"] in networks]
    lines.sort(key=_order)
    for caption, training in (("Training", True), ("Inference", False)):
        if found := [line for line in lines if line["training"] == training]:
            yield _table(caption, _CONTEST, found)
    runs = [line for one in results if one.program == "accuracy" for line in _whole(one)]
    if runs := [line for line in runs if line["n"] >= seeds]:
        yield _table("Whole runs", _RUN, runs)


def _table(caption: str, columns: dict[str, str], rows: Sequence[Row]) -> Table:
    """Make a table without empty columns."""
    kept = {key: heading for key, heading in columns.items() if any(row[key] is not None for row in rows)}
    return Table(caption, kept, rows)


def _order(line: Row) -> tuple[Any, ...]:
    """Sort key: small networks first, large batches first, compiled measurements last."""
    size = line["network"].partition("/")[0]
    rank = SIZES.index(size) if size in SIZES else len(SIZES)
    return rank, line["network"], -line["batch"], line["precision"], line["compiled"] is not None


# ---------------------------------------------------------------- other libraries

_CONTEST = {
    "network": "network",
    "batch": "batch|d",
    "precision": "precision",
    "rate": "images/s|,.1f",
    "share": "of the matrix rate|.0%",
    "others": "others",
    "timm": "× timm|.2f",
    "who": "fastest other",
    "times": "×|.2f",
    "compiled": "compiled: images/s|,.1f",
    "compiled_times": "either way: ×|.2f",
    "default": "their default: ×|.2f",
    "integers": "int8: ×|.2f",
    "openvino": "OpenVINO's: ×|.2f",
    "commit": "commit",
}


def _contests(result: Result) -> Iterator[Row]:
    """Make a line for each network, task and precision of a run."""
    for table in result.tables:
        if found := _MEASURED.match(table.caption):
            network, size, what, batch = found.groups()
            named = network if size == "224" else f"{network} at {size}"
            about = {
                "network": f"{named}, from files" if "from" in what else named,
                "batch": int(batch),
                "training": what != "inference",
                "commit": _short(result.commit),
            }
            usual = _precision(table.rows[0])
            for precision in dict.fromkeys(map(_precision, table.rows)):
                if precision != "int8" and _named(table.rows, precision, VITRAL):
                    yield {**about, **_contest(table.rows, precision, usual=precision == usual)}


def _contest(rows: Sequence[Row], precision: str, usual: bool) -> dict[str, Any]:
    """Compare vitral with the others at one precision; defaults and integers only at the `usual` one, a run's first."""
    ours = _named(rows, precision, VITRAL)
    compiled = _named(rows, precision, f"{VITRAL}, compiled")
    others = _others(rows, precision)
    eager = [row for row in others if not _compiled(row)]
    first = min(eager, key=lambda row: row["median"], default=None)
    libraries = [name for name in LIBRARIES if any(row["name"].startswith(name) for row in others)]
    return {
        "precision": precision,
        "rate": ours[0]["rate"],
        "share": ours[0]["share"],
        "others": "all four" if len(libraries) == len(LIBRARIES) else ", ".join(libraries) or None,
        "timm": _times(_named(eager, precision, "timm"), ours),
        "who": first and first["name"],
        "times": _times(eager, ours),
        "compiled": compiled[0]["rate"] if compiled else None,
        "compiled_times": _times(others, [*ours, *compiled]) if any(map(_compiled, others)) else None,
        "default": _times([row for row in _others(rows, "fp32") if not _compiled(row)], ours)
        if usual and precision != "fp32"
        else None,
        "integers": _times(eager, _named(rows, "int8", f"{VITRAL} (int8)")) if usual else None,
        "openvino": _times(eager, _named(rows, "int8", f"{VITRAL} (openvino-int8)")) if usual else None,
    }


def _precision(row: Row) -> str:
    """ "bf16" of "bf16 (cast)"."""
    return str(row["precision"]).split()[0]


def _compiled(row: Row) -> bool:
    return str(row["name"]).endswith(", compiled")


def _named(rows: Sequence[Row], precision: str, name: str) -> list[Row]:
    return [row for row in rows if row["name"] == name and _precision(row) == precision]


def _others(rows: Sequence[Row], precision: str) -> list[Row]:
    return [row for row in rows if not row["name"].startswith(VITRAL) and _precision(row) == precision]


def _times(theirs: Sequence[Row], ours: Sequence[Row]) -> float | None:
    """Divide the least time of the others by the least of vitral; None if either side was not measured."""
    if not theirs or not ours:
        return None
    return float(min(row["median"] for row in theirs) / min(row["median"] for row in ours))


def _short(commit: str) -> str:
    """ "82a2343+" of "82a23433af with changes"."""
    name, _, changed = commit.partition(" ")
    return f"{name[:7]}+" if changed else name[:7]


# ---------------------------------------------------------------- whole runs

_RUN = {
    "run": "run",
    "n": "seeds|d",
    "accuracy": "accuracy|.2%",
    "least": "least|.2%",
    "greatest": "greatest|.2%",
    "judged": "judged by",
    "views": "with views averaged|.2%",
    "how": "by",
    "seconds": "seconds (threads)",
    "commit": "commit",
}


def _whole(result: Result) -> Iterator[Row]:
    """Make a line for each run from a command to an accuracy."""
    for table in result.tables:
        rows = {row["what"]: row for row in table.rows if "what" in row}
        plain = [row for what, row in rows.items() if what == "test" or what.startswith("test, seeds")]
        command = re.match(r"`[^`]+`", table.caption)
        if not rows or not command:
            continue
        found = max(plain, key=lambda row: row["n"]) if plain else rows["val"]
        chosen = "test" if plain else "validation, which chose the epoch"
        judged = "test, which chose the epoch" if "validated on test" in table.caption else chosen
        views = max((row for what, row in rows.items() if "--tta" in what), key=lambda row: row["accuracy"], default={})
        yield {
            "run": command[0],
            **{key: found[key] for key in ("n", "accuracy", "least", "greatest")},
            "judged": judged,
            "views": views.get("accuracy"),
            "how": f"`{views['what'].partition(', ')[2]}`" if views else None,
            "seconds": ", ".join(_seconds(table.caption)) or None,
            "commit": _short(result.commit),
        }


def _seconds(caption: str) -> Iterator[str]:
    """ "1136 (1)", "552 (2)": seconds and threads."""
    for seconds, device in _SPEED.findall(caption):
        threads = _THREADS.search(device)
        yield f"{seconds} ({threads[1]})" if threads else seconds
