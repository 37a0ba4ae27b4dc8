"""Options as data: reading them from signatures, and those shared by several commands."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from vitral.wording import flag


@dataclasses.dataclass(frozen=True)
class Help:
    """Help text in the annotation of a parameter; `usage` makes it positional: `DATA`, `[DATA]`, `IMAGE …`."""

    text: str
    usage: str | None = None


@dataclasses.dataclass(frozen=True)
class Values:
    """Number and type of the values that an option takes."""

    element: Any
    """`str`, `int`, `float`, a `Literal` of strings, or `bool` for a switch."""
    least: int
    most: int
    scalar: bool
    """True if a single value is not wrapped in a tuple."""

    @classmethod
    def of(cls, kind: object) -> Values:
        """Parse an annotation: `T`, `T | None`, `tuple[T, ...]`, `tuple[T, T]`, or `T` or a tuple of it."""
        union = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
        members = [member for member in union if member is not NoneType]
        tuples = [get_args(member) for member in members if get_origin(member) is tuple]
        if not tuples:
            count = 0 if members[0] is bool else 1
            return cls(members[0], count, count, True)
        scalar, any_number = len(tuples) < len(members), tuples[0][-1] is Ellipsis
        least = 1 if scalar else 0 if any_number else len(tuples[0])
        return cls(tuples[0][0], least, sys.maxsize if any_number else len(tuples[0]), scalar)


@dataclasses.dataclass(frozen=True)
class Option:
    """One option of a command, or one positional argument."""

    name: str
    """The name of the parameter in Python."""
    kind: object
    """The type that the words are converted to."""
    help: str
    default: object = None
    """Shown in help; None shows nothing."""
    usage: str | None = None
    """Placeholder of a positional argument; None for an option."""
    required: bool = False
    group: str = ""
    """Heading under which `--help-all` lists it; empty for an option that `--help` lists, too."""
    own: bool = False
    """True if it may name code of the user, `MODULE:FUNCTION`, besides its choices."""

    @property
    def is_positional(self) -> bool:
        return self.usage is not None

    @property
    def is_switch(self) -> bool:
        return self.values.most == 0

    @functools.cached_property
    def values(self) -> Values:
        return Values.of(self.kind)

    @property
    def title(self) -> str:
        """The name in messages: `--lr-batch`, or `DATA`."""
        return flag(self.name.rstrip("_")) if self.usage is None else self.usage.strip("[] …")

    @property
    def negation(self) -> str:
        """The flag that turns a switch off."""
        return self.title.replace("--", "--no-", 1)


def options_of(command: Callable[..., object]) -> list[Option]:
    """Read the options of a command from its signature, in which each annotation contains a `Help`."""
    hints = get_type_hints(command, include_extras=True)
    options = []
    for parameter in inspect.signature(command).parameters.values():
        kind, about = get_args(hints[parameter.name])
        required = parameter.default is parameter.empty
        default = None if required else parameter.default
        options.append(Option(parameter.name, kind, about.text, default, about.usage, required))
    return options


Format = Annotated[Literal["text", "json"], Help("output format")]
Device = Annotated[str, Help("device to compute on: auto, cpu, cuda or mps")]
DataRoot = Annotated[str, Help("folder for data sets that vitral downloads by name, such as cifar10")]
BadImages = Annotated[Literal["error", "skip"], Help("what to do about unreadable images: stop, or skip them")]
ClassFolders = Annotated[
    Literal["auto", "top", "leaf"] | None,
    Help(
        "which folders are classes: those directly below the splits (top), or the innermost (leaf) (default: the run's)"
    ),
]

# For every command that predicts.
Precision = Annotated[str, Help("number format: auto, bf16, fp32, or int8 after vitral quantize")]
Engine = Annotated[
    str,
    Help("inference engine: auto, plain (the PyTorch module), packed (oneDNN), compiled (torch.compile) or openvino"),
]
PatchSize = Annotated[
    int | None, Help("one of the patch sizes that the run was trained for (default: the network's own)")
]
Tta = Annotated[
    str,
    Help("average over views of each image: none, mirror (2 views), shifts (3) or both (6); slower, but more reliable"),
]
ClassOrder = Annotated[
    str | None,
    Help(
        "order of the classes if the weights do not contain their names: natural (2 before 10), text (10 before 2, as "
        "in torchvision), or a file with one name per line"
    ),
]
Levels = Annotated[
    tuple[int, int] | None,
    Help(
        "pixel values that mean black and white, in images of floats and in gray images of 16 bits or more (default: "
        "as saved with the weights)"
    ),
]
Beams = Annotated[int, Help("for text recognition, the number of texts that beam search keeps; 1 is greedy search")]
