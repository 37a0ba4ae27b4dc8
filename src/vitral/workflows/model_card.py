"""A model card, from the facts that a run has recorded: no figure is computed or typed anew."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from vitral.data.images.preprocessing import Preprocessing
from vitral.evaluation.enough import FOR_A_CLASS
from vitral.evaluation.pages import environment
from vitral.wording import duration, shown

MOST = 20
"""Rows of confusions."""
_MARKDOWN = re.compile(r"([\\`*_\[\]<>|#~])")


@dataclass(frozen=True)
class Facts:
    """Everything that a card states."""

    repository: str
    """ORG/NAME."""
    license: str
    result: Mapping[str, Any]
    """As in result.json."""
    recipe: str
    preprocessing: Preprocessing
    reason: str = ""
    """Why no other library reads the weights; empty for weights in the layout of Hugging Face."""
    notes: Sequence[str] = ()
    """Notes on what the files cannot state."""
    custom: bool = False
    """True if transformers needs the modeling file beside the weights."""

    @property
    def data(self) -> str:
        """Name of the data; a path on somebody's disk is nobody else's business."""
        return Path(str(self.result["data"]).rstrip("/\\")).name

    @property
    def splits(self) -> dict[str, Any]:
        """Measured splits, in the order of their use."""
        return {name: self.result[name] for name in ("val", "test") if name in self.result}


def card(facts: Facts) -> str:
    """Return the card as Markdown with the header that hubs read."""
    splits = facts.splits
    split_name = next(reversed(splits), "")
    last = splits.get(split_name, {})
    classes = last.get("per_class", [])
    made = environment(__package__)
    made.autoescape = False  # Markdown, which `md` escapes
    made.filters.update(md=escaped, share=lambda fraction: f"{100 * fraction:.2f}%", duration=duration)
    text: str = made.get_template("model_card.md.jinja").render(
        header=header(facts),
        name=facts.repository.partition("/")[2],
        repository=facts.repository,
        result=facts.result,
        data=facts.data,
        recipe=facts.recipe,
        preprocessing=facts.preprocessing,
        splits=splits,
        split_name=split_name,
        last=last,
        confusions=confusions(last) if last else [],
        few=[one["name"] for one in classes if one["images"] < FOR_A_CLASS],
        least=FOR_A_CLASS,
        weakest=sorted((one for one in classes if one["images"] and one["recall"] < 1), key=itemgetter("recall"))[:3],
        in_hf_layout=not facts.reason,
        reason=facts.reason,
        notes=facts.notes,
        custom=facts.custom,
    )
    return text


def header(facts: Facts) -> str:
    """The card's metadata, in YAML between lines of dashes."""
    from huggingface_hub import EvalResult, ModelCardData

    results = [
        EvalResult("image-classification", "imagefolder", facts.data, "accuracy", found["accuracy"], dataset_split=name)
        for name, found in facts.splits.items()
    ]
    data = ModelCardData(
        license=facts.license,
        library_name="vitral" if facts.reason else "transformers",
        model_name=facts.repository,
        pipeline_tag="image-classification",
        tags=["vision", "image-classification", "vitral"],
        metrics=["accuracy"],
        eval_results=results or None,
    )
    return f"---\n{data.to_yaml()}\n---"


def confusions(found: Mapping[str, Any]) -> list[dict[str, object]]:
    """The most frequent confusions of a split: class, predicted class and number of images."""
    names = [one["name"] for one in found["per_class"]]
    cells = [
        {"true": names[i], "predicted": names[j], "images": count}
        for i, row in enumerate(found["confusion"])
        for j, count in enumerate(row)
        if i != j and count
    ]
    return sorted(cells, key=lambda one: -one["images"])[:MOST]


def escaped(text: object) -> str:
    """Text as it stands, in a cell or a line of Markdown."""
    return _MARKDOWN.sub(r"\\\1", shown(str(text)))
