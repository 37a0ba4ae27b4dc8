"""Consoles, tables and command lines: results to standard output, everything else to standard error."""

from __future__ import annotations

import contextlib
import html
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from vitral import activity
from vitral.wording import flag, printable


class _Console(Console):
    """A console that escapes control characters in file and class names, and ends the line of the activity."""

    def print(self, *objects: Any, **options: Any) -> None:
        activity.end()
        super().print(*objects, **options)

    def set_live(self, live: Any) -> Any:
        activity.end()
        return super().set_live(live)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


def stdout() -> Console:
    """Return the console for results."""
    return _Console()


def stderr(*, quiet: bool = False) -> Console:
    """Return the console for progress, plans and errors. It does not interpret markup, which file names may contain."""
    return _Console(stderr=True, quiet=quiet, markup=False, emoji=False)


def draws(console: Console) -> bool:
    """True if a bar can be drawn again and again: on a terminal. Color may be forced elsewhere, as in notebooks."""
    return console.is_terminal and console.file.isatty()


def table(title: str | None = None, *, header: bool = True) -> Table:
    """Return an empty table without lines: a dim header, two spaces between columns."""
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=None,
        padding=(0, 2, 0, 0),
        pad_edge=False,
        header_style="dim",
        show_header=header,
    )


def html_table(title: str, rows: Iterable[Sequence[str]], columns: Sequence[str] = ()) -> str:
    """Return a small table for notebooks. The last cell of each row is HTML; all other text is escaped."""
    head = "".join(f"<th>{html.escape(printable(name))}</th>" for name in columns)
    body = f"<tr>{head}</tr>" if head else ""
    for *texts, markup in rows:
        body += f"<tr>{''.join(f'<td>{html.escape(printable(text))}</td>' for text in texts)}<td>{markup}</td></tr>"
    return f"<table><caption>{html.escape(printable(title))}</caption><tbody>{body}</tbody></table>"


_MOST_TOGETHER = 20
"""Objects of a list that a notebook shows."""


def shown_together(objects: Sequence[Any]) -> str:
    """Return the first objects of a list for a notebook, and the number of the others."""
    left = len(objects) - _MOST_TOGETHER
    parts = [one._repr_html_() for one in objects[:_MOST_TOGETHER]]
    return "".join([*parts, *([f"<p>and {left:,} more</p>"] if left > 0 else [])])


class Described:
    """A class whose objects are a line at the Python prompt, not all their arrays, and a table in notebooks."""

    def described(self) -> Mapping[str, str]:
        """Return the facts that `repr` and notebooks show, as a dict from name to text."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return printable(f"{type(self).__name__}({', '.join(self.described().values())})")

    def _repr_html_(self) -> str:
        return html_table(
            type(self).__name__, [(name, html.escape(printable(value))) for name, value in self.described().items()]
        )


def command_line(command: str, arguments: Iterable[object], options: Mapping[str, object]) -> str:
    """Return a command line, quoted for a shell; `options` are keyed by their Python names."""
    words = ["vitral", command, *map(str, arguments)]
    for name, value in options.items():
        if isinstance(value, bool):
            words.append(flag(name) if value else flag(f"no_{name}"))
        else:
            words += [flag(name), *map(str, value if isinstance(value, (tuple, list)) else [value])]
    return shlex.join(words)


class ProgressCounter:
    """The progress of a bar: call it with the number of images just done."""

    def __init__(self, bar: Any, task: Any):
        self.bar, self.task, self.open = bar, task, bar.tasks[0].total is None

    def __call__(self, done: int) -> None:
        self.bar.advance(self.task, done)

    def reach(self, done: int, total: int) -> None:
        """Set the number of images done, and the total."""
        self.bar.update(self.task, completed=done, total=total)

    def expect(self, images: int) -> None:
        """Add to the total, if it was unknown."""
        if self.open:
            self.bar.update(self.task, total=(self.bar.tasks[0].total or 0) + images)


def expect(progress: Callable[[int], None] | None, images: int) -> None:
    """Report the number of images that follow, of which `progress` is then called."""
    if isinstance(progress, ProgressCounter):
        progress.expect(images)


def go_on(progress: Callable[[int], None] | None, what: str) -> None:
    """Report that the images are done, and what comes next, for a time that is not known."""
    if isinstance(progress, ProgressCounter):
        progress.bar.remove_task(progress.task)
        progress.task = progress.bar.add_task(what, total=None)
        if progress.bar.disable:
            activity.tell(what)


@contextlib.contextmanager
def counting(console: Console, what: str, total: int | None = None) -> Iterator[ProgressCounter]:
    """Show a bar for work on `total` images (None: as many as are expected later), with images a second and the time
    left. It vanishes in the end. Elsewhere than on a terminal, a line says what is done.
    """
    from rich import progress as bars  # `vitral --help` does not wait for it

    if not (console.quiet or draws(console)):
        activity.tell(what)

    class Rate(bars.ProgressColumn):
        def render(self, task: bars.Task) -> Text:
            return Text(f"{task.speed:,.0f} images/s" if task.speed else "", "dim")

    columns = (
        bars.SpinnerColumn(),
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        Rate(),
        bars.TimeRemainingColumn(),
    )
    with bars.Progress(*columns, console=console, transient=True, disable=not draws(console)) as bar:
        task = bar.add_task(what, total=total)
        yield ProgressCounter(bar, task)
