"""Published weights that a run starts from where they cost no wait: one table, and which of them are at hand."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vitral.errors import VitralError
from vitral.weights.load import read
from vitral.weights.read import hub

SECONDS = 3.0
"""Most seconds that a plan waits for the hub."""


@dataclass(frozen=True)
class Published:
    """Weights on the hub, under a license that permits any use."""

    reference: str
    megabytes: int
    license: str
    knows: str
    """Images that it was trained on."""

    def __str__(self) -> str:
        return f"{self.reference} ({self.megabytes} MB, {self.license}, {self.knows})"


_AUGREG = "trained on 14 million photographs of ImageNet-21k"
PUBLISHED = {
    "tiny": Published("timm:vit_tiny_patch16_224.augreg_in21k_ft_in1k", 23, "Apache-2.0", _AUGREG),
    "small": Published("timm:vit_small_patch16_224.augreg_in21k_ft_in1k", 88, "Apache-2.0", _AUGREG),
    "self-supervised": Published(
        "timm:vit_small_patch14_reg4_dinov2.lvd142m", 88, "Apache-2.0", "trained on 142 million images without labels"
    ),
}
"""By kind. Sizes of the files and licenses are those of their pages on the hub."""
_ORDER = {False: ("tiny", "small"), True: ("small", "self-supervised", "tiny")}
"""The kinds that a CPU and a GPU take, the first at hand."""


def proposed(gpu: bool) -> Published:
    """Return the weights that a plan names for a machine."""
    return PUBLISHED[_ORDER[gpu][0]]


@dataclass(frozen=True)
class AtHand:
    """Weights that can be used at once, pinned to their commit; `reference` is empty if there are none."""

    reference: str = ""
    why: str = ""
    damaged: tuple[str, ...] = ()
    """A clause for each copy in the cache that cannot be read, with the way to mend it."""


def at_hand(gpu: bool) -> AtHand:
    """Return weights that can be used at once, with the reason.

    Those in huggingface_hub's cache are; with a GPU also those of a hub that answers within `SECONDS`, which are
    fetched. Nobody has asked for these weights, so that neither a damaged copy nor a hub that cannot be reached or
    breaks off is an error here.
    """
    damaged: list[str] = []
    for kind in _ORDER[gpu]:
        one = PUBLISHED[kind]
        try:
            found = hub.cached(one.reference)
        except OSError:  # folders of the cache that cannot be listed
            continue
        if found and not (why := unreadable(found.path)):
            return AtHand(found.reference, f"in the cache already ({one.license}), {one.knows}", tuple(damaged))
        if found:
            damaged.append(f"{one.reference} in the cache cannot be read ({why}): delete {found.path.parents[1]}")
    one = proposed(gpu)
    if gpu and not damaged and hub.answers(one.reference, SECONDS):
        try:
            fetched = hub.resolve(one.reference)
        except VitralError:
            return AtHand()
        if not unreadable(fetched.path):
            return AtHand(fetched.reference, f"{one.megabytes} MB of the hub ({one.license}), {one.knows}")
    return AtHand(damaged=tuple(damaged))


def unreadable(reference: str | Path) -> str:
    """Return why weights cannot be read, in one clause; empty if they can. Every byte of them is read."""
    try:
        read(reference).build()
    except VitralError as error:
        return f"{error.what}: {error.why}" if error.why else error.what
    except Exception as error:  # of any kind: what is damaged raises anything
        return f"{type(error).__name__}: {error}"
    return ""
