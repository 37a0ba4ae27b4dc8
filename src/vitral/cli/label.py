"""`vitral label`."""

from __future__ import annotations

import os
import secrets
import sys
import webbrowser
from pathlib import Path
from typing import Annotated

from vitral.cli.options import Help
from vitral.cli.output import print_notes, program, python, say
from vitral.console import command_line
from vitral.errors import UsageError
from vitral.wording import count


def label(
    data: Annotated[tuple[str, ...], Help("folders, tables or lists of images", "DATA …")] = (),
    *,
    out: Annotated[str | None, Help("table of the labels, a .csv (default: labels.csv in the folder)")] = None,
    classes: Annotated[tuple[str, ...], Help("names of classes to begin with")] = (),
    labels: Annotated[
        bool,
        Help("begin with the labels of class folders or the table, marked as unchecked; --no-labels begins without"),
    ] = True,
    init: Annotated[str, Help("weights whose features suggest classes: a run, a file, timm:NAME, …")] = "backbone",
    port: Annotated[int, Help("port of the page; 0 chooses a free one")] = 0,
    open_: Annotated[bool, Help("open the page in a browser, if this machine has a screen")] = True,
    export: Annotated[
        str | None,
        Help(
            "write a web page into this new folder, on which visitors teach their own classes; everything runs in "
            "their browser"
        ),
    ] = None,
    overwrite: Annotated[bool, Help("with --export: replace an earlier page in that folder")] = False,
    runtime: Annotated[
        str | None, Help("with --export: archive of the npm package of ONNX Runtime Web (default: downloaded)")
    ] = None,
) -> int:
    """Label images in the browser, on your own machine. Every action is saved at once."""
    from vitral.serving.extra import check_installed

    if export is not None:
        unused = {"your images": data, "--out": out, "--no-labels": not labels, "--port": port, "--no-open": not open_}
        if given := [name for name, value in unused.items() if value]:
            why = "it only writes a page, to which visitors add their own images"
            raise UsageError(f"--export does not use {given[0]}", why=why, hint="vitral label --export FOLDER")
        return _export(export, init, classes, runtime, overwrite)
    if runtime is not None:
        raise UsageError("--runtime is for --export", why="this machine runs the network itself", hint="leave it out")
    if overwrite:
        raise UsageError("--overwrite is for --export", why="labels are never overwritten", hint="leave it out")
    if not data:
        raise UsageError("no images to label", hint="vitral label FOLDER")
    check_installed()
    from vitral.labeling.application import build
    from vitral.labeling.assistant import Assistant
    from vitral.labeling.service import Labeling
    from vitral.labeling.session import Session, default_table
    from vitral.labeling.teach import Teacher
    from vitral.serving.server import address, bind, serve_on

    if not 0 <= port <= 65535:
        raise UsageError(f"--port is from 0 to 65535, not {port}", hint="--port 8001, or --port 0 for any free port")
    table = Path(out) if out else default_table(data)
    if table.suffix.lower() != ".csv":
        raise UsageError("--out must name a .csv", where=table, hint="--out labels.csv")
    with Session(data, table, classes, labels=labels) as session, bind("127.0.0.1", port, "--port") as bound:
        token = secrets.token_urlsafe(24)
        url = f"{address(bound)}/#{token}"
        print_notes(session.notes)

        def started() -> None:
            place = f"in {table}" if table.exists() else f"your changes go to {table}"
            say(f"Labels   {session.labeled:,} of {count(len(session.state.images), 'image')}, {place}")
            say(f"Page     {url} (Ctrl-C ends; everything is saved)")
            session.publish(url)
            if open_ and _has_screen():
                webbrowser.open(url)

        with Assistant(session, init) as assistant, Teacher(session) as teacher:
            labeling = Labeling(session, token, assistant, teacher)
            serve_on(bound, labeling, build(labeling), grace=1, started=started)
        seen, labeled = len(session.notes), session.labeled
    print_notes(session.notes[seen:])
    if not session.is_kept:
        say("\nNothing was changed, so no table was written")
    else:
        say(f"\nSaved    {labeled:,} of {count(len(session.state.images), 'image')} labeled, in {table}")
        say(f"\nNext:\n  {command_line('train', [str(table)], {}).replace('vitral', program(), 1)}")
    return 0


def _export(folder: str, init: str, classes: tuple[str, ...], runtime: str | None, overwrite: bool) -> int:
    """Write the page on which visitors teach."""
    from vitral.export.teach import export_teaching
    from vitral.export.web import publishing
    from vitral.labeling.state import check_class
    from vitral.web import serving_command

    for name in classes:
        check_class(name)
    names = tuple(dict.fromkeys(classes))
    difference = export_teaching(folder, init, classes=names, runtime=runtime, overwrite=overwrite)
    say(f"Page     {folder}")
    say(f"Parity   its features differ from the model's by at most {difference:.1g} of the largest one")
    say(f"\nNext:\n  {serving_command(Path(folder)).replace('python', python(), 1)}")
    for line in publishing(Path(folder)):
        say(line)
    return 0


def _has_screen() -> bool:
    """True if a browser could show a window to the person who typed the command."""
    if "SSH_CONNECTION" in os.environ:
        return False
    return sys.platform in ("darwin", "win32") or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
