"""Terms of the glossary that `--help` of a command explains. A list, because a word has other meanings elsewhere: the
token of `vitral serve` is a password, and `data check` ranks labels.
"""

from __future__ import annotations

from vitral.glossary import explained

_PATCH = "patch, token"
_TERMS = {
    "train": ("backbone", "epoch", "linear probe", "logits", _PATCH, "stem"),
    "pretrain": ("backbone", "epoch", "logits", _PATCH, "stem"),
    "evaluate": (_PATCH,),
    "predict": (_PATCH,),
    "explain": ("faithfulness, SRG",),
    "inspect": (_PATCH,),
    "study data": ("epoch",),
    "study compute": ("epoch",),
    "study options": ("epoch",),
    "tune": ("epoch",),
    "reproduce": ("epoch",),
    "replay": ("epoch",),
    "convert": ("backbone", _PATCH),
    "data check": ("backbone",),
}


def terms_of(command: str) -> list[tuple[str, str]]:
    """Return the terms that the help of a command explains, each with its meaning."""
    return explained(_TERMS.get(command, ()))
