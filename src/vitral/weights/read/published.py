"""Published weights that a run starts from where the time allows: one table, and which of them are at hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vitral import activity
from vitral.errors import VitralError
from vitral.weights.load import read
from vitral.weights.read import hub
from vitral.wording import duration

SECONDS = 3.0
"""Most seconds that a plan waits for the answer of the hub."""
_LATE = 3.0
"""Times the predicted time after which a download is given up: the hub has become slower, or did not tell the truth."""
_LEAST = 10.0
"""Seconds that a download has in any case."""


@dataclass(frozen=True)
class Published:
    """Weights on the hub, under a license that permits any use."""

    reference: str
    model: str
    """Name of a network that computes as fast."""
    megabytes: int
    license: str
    knows: str
    """Images that it was trained on."""

    def __str__(self) -> str:
        return f"{self.reference} ({self.megabytes} MB)"


_AUGREG = "trained on 14 million photographs of ImageNet-21k"
TINY = Published("timm:vit_tiny_patch16_224.augreg_in21k_ft_in1k", "Ti/16", 23, "Apache-2.0", _AUGREG)
SMALL = Published("timm:vit_small_patch16_224.augreg_in21k_ft_in1k", "S/16", 88, "Apache-2.0", _AUGREG)
SELF_SUPERVISED = Published(
    "timm:vit_small_patch14_reg4_dinov2.lvd142m",
    "S/14",
    88,
    "Apache-2.0",
    "trained on 142 million images without labels",
)
PUBLISHED = {False: (SMALL, TINY), True: (SMALL, SELF_SUPERVISED, TINY)}
"""With a GPU or without: the weights to start from, best first. Sizes and licenses are from their pages on the hub."""


def proposed(gpu: bool) -> Published:
    """Return the weights that a plan mentions for a machine: on a CPU the smallest."""
    return SMALL if gpu else TINY


@dataclass(frozen=True)
class AtHand:
    """Weights that can be used, pinned to their commit; `reference` is empty if there are none."""

    reference: str = ""
    why: str = ""
    """Origin of the weights, or the reason that there are none; empty if the hub was not asked or does not answer."""
    features_seconds: float = 0.0
    """The time that `seconds_of` returned for them."""
    download_seconds: float = 0.0
    silent: bool = False
    """True if the hub was asked and did not answer in time."""
    damaged: tuple[str, ...] = ()
    """A clause for each copy in the cache that cannot be read, with the way to mend it."""


def at_hand(gpu: bool, seconds_of: Callable[[Published], float], limit: float) -> AtHand:
    """Return weights that can be used within `limit` seconds, with the reason.

    `seconds_of` returns the time that a run takes with these weights once they are on this machine. Weights in
    huggingface_hub's cache come first. Otherwise a hub that answers within `SECONDS` is asked, whose rate is measured.
    Nobody has asked for these weights, so neither a damaged copy nor a hub that is slow, lies or breaks off is an
    error.
    """
    damaged: list[str] = []
    slow = ""
    for one in PUBLISHED[gpu]:
        try:
            found = hub.cached(one.reference)
        except OSError:  # folders of the cache that cannot be listed
            continue
        if found is None:
            continue
        if why := unreadable(found.path):
            damaged.append(f"{one.reference} in the cache cannot be read ({why}): delete {found.path.parents[1]}")
        elif (needed := seconds_of(one)) <= limit:
            why = f"in the cache already ({one.license}), {one.knows}"
            return AtHand(found.reference, why, needed, damaged=tuple(damaged))
        else:
            slow = _too_slow(one, needed, limit)
    if damaged or slow:
        return AtHand(why=slow, damaged=tuple(damaged))
    return _from_hub(PUBLISHED[gpu], seconds_of, limit)


def _from_hub(candidates: tuple[Published, ...], seconds_of: Callable[[Published], float], limit: float) -> AtHand:
    """Fetch the first of the weights whose download and run fit into `limit` seconds."""
    activity.tell("asking the hub for published weights")
    offer = hub.offered(candidates[0].reference, SECONDS)
    if offer is None:
        return AtHand(silent=not hub.is_offline())
    slow = ""
    for one in candidates:
        download = offer.seconds if one == candidates[0] else 1e6 * one.megabytes / offer.rate
        features = seconds_of(one)
        if features + download > limit:
            slow = _too_slow(one, features + download, limit)
            continue
        activity.tell(f"fetching {one.megabytes} MB of {one.reference}, about {duration(download)}")
        fetched = hub.fetched_within(one.reference, max(_LEAST, _LATE * download))
        if fetched is None or unreadable(fetched.path):
            return AtHand(why=f"the download of {one.reference} failed")
        why = f"{one.megabytes} MB from the hub ({one.license}), {one.knows}"
        return AtHand(fetched.reference, why, features, download)
    return AtHand(why=slow)


def _too_slow(one: Published, needed: float, limit: float) -> str:
    return f"{one.reference} would take {duration(needed)} here, more than {duration(limit)}"


def unreadable(reference: str | Path) -> str:
    """Return why weights cannot be read, in one clause; empty if they can. Every byte of them is read."""
    try:
        read(reference).build()
    except VitralError as error:
        return f"{error.what}: {error.why}" if error.why else error.what
    except Exception as error:  # of any kind: what is damaged raises anything
        return f"{type(error).__name__}: {error}"
    return ""
