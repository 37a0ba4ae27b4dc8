"""Studies of the paper's claims (arXiv 2010.11929), one file each, at the scale of a laptop and at full scale.

A file has the claim in a sentence, its place in the paper, the study that asks it and the differences that it expects.
`names` are the networks that replace `$…` at a scale.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any, Literal

from vitral import bounded
from vitral.errors import unknown
from vitral.studies.study import Expectation, Study

Scale = Literal["laptop", "full"]


def names() -> tuple[str, ...]:
    """Names of the studies."""
    found = (file.name for file in files(__package__).iterdir())
    return tuple(sorted(name.removesuffix(".json") for name in found if name.endswith(".json")))


def paper_study(name: str, scale: Scale = "laptop", **changes: Any) -> Study:
    """Return a study by name; `changes` replace fields of it, such as `data` and `seeds`, and single `options`.

    Raises `UsageError` for an unknown name or scale.
    """
    if name not in names():
        raise unknown("study of the paper", name, names(), hint="vitral reproduce")
    record = bounded.parse(files(__package__).joinpath(f"{name}.json").read_bytes())
    if scale not in record["scales"]:
        raise unknown("scale", scale, record["scales"])
    at = record["scales"][scale]
    stand_ins = at.pop("names", {})
    given = {key: value for key, value in changes.items() if value is not None and key != "options"}
    fields = {"kind": record["kind"], "vary": record.get("vary", {}), **at, **given}
    fields["options"] = {**at.get("options", {}), **changes.get("options", {})}
    ends = {"smallest": min, "largest": max}
    axis = fields.get("fractions") or fields.get("epochs") or ()
    expects = [
        Expectation(first, relation, second, where=float(ends[where](axis)) if where else None)
        for first, relation, second, where in record["expects"]
    ]
    return Study.from_json(
        _named({**fields, "expects": [vars(one) for one in expects]}, stand_ins)
        | {
            "title": record["title"],
            "claim": f"{record['claim']} ({record['source']} of the paper)",
            "note": record["note"],
        }
    )


def _named(value: object, stand_ins: dict[str, str]) -> Any:
    """Replace `$…` by the networks of the scale."""
    if isinstance(value, dict):
        return {key: _named(one, stand_ins) for key, one in value.items()}
    if isinstance(value, list):
        return [_named(one, stand_ins) for one in value]
    if isinstance(value, str):
        for name, network in stand_ins.items():
            value = value.replace(name, network)
    return value
