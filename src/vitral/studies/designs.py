"""The designs of studies: what each varies, how it is put into words, and what it refuses. One class per kind."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import ClassVar, Protocol

from vitral.studies.spans import Span, combinations, corners


class Asked(Protocol):
    """The values of a study from which its grid is made."""

    @property
    def models(self) -> tuple[str, ...]: ...

    @property
    def fractions(self) -> tuple[float, ...]: ...

    @property
    def epochs(self) -> tuple[int, ...]: ...

    @property
    def vary(self) -> Mapping[str, tuple[object, ...] | Span]: ...


class Design:
    """A kind of study."""

    title: ClassVar[str]
    """Of its page."""
    figure: ClassVar[tuple[str, str]]
    """Title of its figure, and how to read it."""
    command: ClassVar[str]
    """The command `vitral study …` that makes it."""
    needs: ClassVar[str] = "models"
    """The option without which there is nothing to compare, and an example of it."""
    example: ClassVar[str] = "S/16 BiT-R50x1"
    factor: ClassVar[str | None] = None
    """The factor at whose values networks are compared; None if the values of options are compared."""
    column: ClassVar[str] = ""
    """Heading of that factor in the table of differences."""
    sets: ClassVar[tuple[str, ...]] = ("model",)
    """Options of a run that it sets itself."""
    searches: ClassVar[bool] = False
    """True if each run depends on the results of the runs before, so that there is no grid."""
    draws_images: ClassVar[bool] = False
    """True if each seed draws the training images anew."""

    def grid(self, asked: Asked) -> Iterator[dict[str, object]]:
        """Return the factors of each run but the seed."""
        raise NotImplementedError

    def options_of(self, factors: Mapping[str, object]) -> dict[str, object]:
        """Return the options of `vitral.train` that these factors stand for."""
        return dict(factors)

    def fixes_epochs(self, stated: Collection[str]) -> bool:
        """True if it states the epochs of its runs, by the options that are set or varied: then it has no minutes."""
        return "epochs" in stated

    def in_words(self, value: float) -> str:
        """Put a value of `factor` into words."""
        raise NotImplementedError

    def start_of(self, where: str) -> str:
        """Return the start of a sentence on the networks at a value of `factor`, given in words."""
        raise NotImplementedError

    def addition(self, where: str) -> str:
        """Return the end of a sentence on a difference at that value; "" to leave it out."""
        return ""


def _models(asked: Asked) -> list[dict[str, object]]:
    return [{"model": one} for one in asked.models] or [{}]


class ByData(Design):
    """Networks over the amount of training images."""

    title = "Accuracy by amount of data"
    figure = (
        "Accuracy over training images",
        "Fractions with the same seed are nested, with the same proportion of every class.",
    )
    command, factor, column = "data", "fraction", "data"
    sets = ("train_share", "stratified", "model")
    draws_images = True

    def grid(self, asked: Asked) -> Iterator[dict[str, object]]:
        yield from ({**model, "fraction": one} for model in _models(asked) for one in asked.fractions)

    def options_of(self, factors: Mapping[str, object]) -> dict[str, object]:
        model = {name: value for name, value in factors.items() if name == "model"}
        return {**model, "train_share": factors["fraction"], "stratified": True}

    def in_words(self, value: float) -> str:
        return "all images" if value == 1 else f"{100 * value:g}% of the images"

    def start_of(self, where: str) -> str:
        return f"With {where}"

    def addition(self, where: str) -> str:
        return f" with {where}"


class ByCompute(Design):
    """Networks over the length of training."""

    title = "Accuracy by compute"
    figure = ("Accuracy over compute", "The dotted steps are the front: nothing cheaper is more accurate.")
    command, factor, column = "compute", "epochs", "length"

    def grid(self, asked: Asked) -> Iterator[dict[str, object]]:
        yield from ({**model, "epochs": one} for model in _models(asked) for one in asked.epochs)

    def fixes_epochs(self, stated: Collection[str]) -> bool:
        return True

    def in_words(self, value: float) -> str:
        return f"{value:g} {'epoch' if value == 1 else 'epochs'}"

    def start_of(self, where: str) -> str:
        return f"After {where}"


class ByOptions(Design):
    """Every combination of the values of options."""

    title = "Accuracy by options"
    figure = ("Options in order of mean accuracy", "A diamond is the mean, a line its interval, a dot a seed.")
    command, needs, example, sets = "options", "vary", "lr=1e-3,3e-4", ()

    def grid(self, asked: Asked) -> Iterator[dict[str, object]]:
        yield from combinations(corners(asked.vary))


class Search(ByOptions):
    """Trials of options, drawn one after another by the results before."""

    title = "Search for options"
    figure = (
        "Validation accuracy of trials",
        "The line is the best so far; hollow points were stopped early, at the accuracy that they had reached.",
    )
    searches = True

    def grid(self, asked: Asked) -> Iterator[dict[str, object]]:
        yield from ()

    def fixes_epochs(self, stated: Collection[str]) -> bool:
        return False


DESIGNS: dict[str, Design] = {"data": ByData(), "compute": ByCompute(), "options": ByOptions(), "search": Search()}
