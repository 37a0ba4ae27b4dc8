"""Words of other libraries that Python accepts for options."""

from __future__ import annotations

from collections.abc import Mapping

from vitral.errors import UsageError

ALSO = {"transform": "augment", "sampler": "sampling"}
"""Other word → option. The command line does not have them."""


def by_own_names(options: Mapping[str, object]) -> dict[str, object]:
    """Rename options of `ALSO`. Raises `UsageError` for an option that is given under both names."""
    if twice := [other for other, own in ALSO.items() if other in options and own in options]:
        own = ALSO[twice[0]]
        raise UsageError(f"{twice[0]}= and {own}= are the same option", hint=f"leave {twice[0]}= out")
    return {ALSO.get(name, name): value for name, value in options.items()}
