"""Published weights that a run starts from where they cost no wait: one table, and which of them are at hand."""

from __future__ import annotations

from dataclasses import dataclass

from vitral.errors import VitralError
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


def at_hand(gpu: bool) -> tuple[str, str] | None:
    """Return weights that can be used at once, pinned to their commit, with the reason; None if there are none.

    Those in huggingface_hub's cache are; with a GPU also those of a hub that answers within `SECONDS`, which are
    fetched. A hub that cannot be reached or breaks off is no error here.
    """
    for kind in _ORDER[gpu]:
        if found := hub.cached(PUBLISHED[kind].reference):
            return found.reference, f"in the cache already ({PUBLISHED[kind].license}), {PUBLISHED[kind].knows}"
    one = proposed(gpu)
    if not gpu or not hub.answers(one.reference, SECONDS):
        return None
    try:
        return hub.resolve(one.reference).reference, f"{one.megabytes} MB of the hub ({one.license}), {one.knows}"
    except VitralError:
        return None
