"""Kinds of findings of `vitral data check` about single images; apart, so that the command line imports no numpy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Kind = Literal[
    "unreadable",
    "leak",
    "contradiction",
    "copy",
    "near-duplicate",
    "one-color",
    "blurred",
    "graphic",
    "size",
    "stranger",
    "wrong-label",
]
"""As typed, worst first."""

HEADINGS: Mapping[Kind, str] = {
    "unreadable": "unreadable",
    "leak": "leak between splits",
    "contradiction": "contradicting labels",
    "copy": "copies",
    "near-duplicate": "near-duplicates",
    "one-color": "one color",
    "blurred": "blurred",
    "graphic": "text or screenshot",
    "size": "unusual size",
    "stranger": "unlike all others",
    "wrong-label": "label likely wrong",
}
"""Kind → heading."""
