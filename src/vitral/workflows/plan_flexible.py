"""The planning step of `--patch-sizes`: one network whose patch size is chosen when it is used (FlexiViT)."""

from __future__ import annotations

import math
from typing import Any

from vitral.console import flag
from vitral.errors import UsageError
from vitral.model import ViTConfig
from vitral.training.plan import Choice
from vitral.workflows.draft import Draft

_ALLOWED: dict[str, Any] = {
    "checkpointing": False, "whiten": False, "compile": False, "graphs": False, "pack": False,
}  # fmt: skip
"""Options that a network of several patch sizes fixes, with their values."""


def flex_patches(draft: Draft) -> Draft:
    """Check the patch sizes, and fix the options that do not go with them."""
    run, given, config = draft.run, draft.given, draft.config
    sizes = tuple(sorted(set(run.patch_sizes)))
    if not sizes:
        return draft
    for name, allowed in _ALLOWED.items():
        if name in given and given[name] != allowed:
            why = "each step resizes the patches"
            raise UsageError(f"--patch-sizes does not support {flag(name)}", why=why, hint="leave it out")
    if not isinstance(config, ViTConfig) or config.hybrid:
        why = "it has no kernel over patches of pixels"
        raise UsageError(f"--patch-sizes does not support {run.model}", why=why, hint="--model Nano/16, or S/16")
    least = math.lcm(*sizes, *config.patch)
    if bad := [size for size in sizes if any(n % size for n in run.size)]:
        fitting = max(1, round(max(run.size) / least)) * least
        what = f"images of {run.size[0]}×{run.size[1]} pixels have no whole patches of {bad[0]}"
        raise UsageError(what, hint=f"--image-size {fitting}")
    shown = " ".join(map(str, sizes))
    why = f"one drawn for each batch; weights are kept at {config.patch[0]} (FlexiViT, arXiv 2212.08013)"
    return draft.change(Choice("patch sizes", shown, why), patch_sizes=sizes, **_ALLOWED)
