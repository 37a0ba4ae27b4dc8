"""Tables that other packages extend by entry points: a package `vitral-x` adds an entry without a fork.

    [project.entry-points."vitral.sources"]
    letters = "vitral_x.letters"

Groups: `vitral.sources`, `vitral.tasks`, `vitral.networks`, `vitral.formats`, `vitral.methods` and `vitral.trackers`;
`vitral.testing` has the contracts of their entries, but for tasks. Metadata is read when a name is not
built in, and a package is imported when its entry is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import TypeVar

from vitral.errors import UsageError

T = TypeVar("T")


class Extensible(Mapping[str, T]):
    """A table of built-in entries, then those of installed packages. A built-in name cannot be replaced."""

    def __init__(self, group: str, built_in: Mapping[str, T], load: Callable[[EntryPoint], T] = EntryPoint.load):
        """`load` turns an entry point of `group` into an entry; by default it imports the object."""
        self.group, self.built_in, self._load = group, dict(built_in), load

    @cached_property
    def _added(self) -> dict[str, dict[str, EntryPoint]]:
        """Name → package → entry; a package that is found twice, by two paths, is one."""
        found: dict[str, dict[str, EntryPoint]] = {}
        for one in sorted(entry_points(group=self.group), key=lambda one: one.name):
            if one.name not in self.built_in:
                found.setdefault(one.name, {}).setdefault(one.dist.name if one.dist else one.value, one)
        return found

    def __getitem__(self, name: str) -> T:
        """Return the entry; `UsageError` for a package that cannot be imported and for a name that two packages add,
        `KeyError` without an entry.
        """
        if name in self.built_in:
            return self.built_in[name]
        (package, entry), *others = self._added[name].items()
        if others:
            packages = [package, *(other for other, _ in others)]
            hint, why = f"pip uninstall {packages[-1]}", f"it may mean that of {' or '.join(packages)}"
            raise UsageError(f"{len(packages)} packages add {name} to {self.group}", why=why, hint=hint)
        try:
            return self._load(entry)
        except Exception as error:  # a package may fail in any way
            where, why = f"{self.group}: {name} = {entry.value}", f"{type(error).__name__}: {error}"
            hint = f"pip install --upgrade {package}, or pip uninstall {package}"
            raise UsageError(f"the package {package} is broken", where=where, why=why, hint=hint) from error

    def __contains__(self, name: object) -> bool:
        return name in self.built_in or name in self._added

    def __iter__(self) -> Iterator[str]:
        yield from self.built_in
        yield from self._added

    def __len__(self) -> int:
        return len(self.built_in) + len(self._added)
