"""Simulate Windows for the modules of vitral, and run commands in it; Python, numpy and torch see the real system.

As a script: `python windows.py FOLDER`, with the words of commands as JSON on standard input. Results are JSON, too.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import fcntl
import io
import json
import multiprocessing
import os
import pathlib
import platform
import re
import shutil
import signal
import sys
import threading
import types
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

_NO_MODULES = {"fcntl", "resource", "termios", "tty", "pty", "pwd", "grp", "syslog", "readline"}
_NO_CALLS = (
    "fork",
    "forkpty",
    "pread",
    "preadv",
    "pwrite",
    "pwritev",
    "posix_fadvise",
    "posix_fallocate",
    "getuid",
    "geteuid",
    "getgid",
    "getegid",
    "getpgid",
    "getpgrp",
    "getsid",
    "setsid",
    "killpg",
    "nice",
    "statvfs",
    "fstatvfs",
    "sysconf",
    "sysconf_names",
    "confstr",
    "getloadavg",
    "sched_getaffinity",
    "sched_setaffinity",
    "mkfifo",
    "mknod",
    "chown",
    "lchown",
    "fchown",
    "fchmod",
    "uname",
    "wait",
    "wait3",
    "wait4",
    "WNOHANG",
    "openpty",
    "set_blocking",
    "get_blocking",
    "register_at_fork",
    "sendfile",
    "sync",
    "fdatasync",
    "O_NOFOLLOW",
    "O_NONBLOCK",
    "O_CLOEXEC",
    "O_DIRECTORY",
    "O_NOCTTY",
    "O_SYNC",
    "O_DSYNC",
    "O_DIRECT",
)
_SIGNALS = ("SIGINT", "SIGTERM", "SIGABRT", "SIGFPE", "SIGILL", "SIGSEGV")
_FORBIDDEN = re.compile(r'[<>:"|?*\\\x00-\x1f]|[. ]$|^(con|prn|aux|nul|com\d|lpt\d)(\.|$)', re.IGNORECASE)
_BINARY = 0x8000


# ---- modules


def _windows_os() -> types.ModuleType:
    """Make an `os` without POSIX, whose descriptors are text unless O_BINARY is given."""
    made = types.ModuleType("os")
    made.__dict__.update({name: value for name, value in vars(os).items() if name not in _NO_CALLS})
    text: set[int] = set()

    def opened(path: Any, flags: int, mode: int = 0o777) -> int:
        descriptor = os.open(path, flags & ~_BINARY, mode)
        if not flags & _BINARY:
            text.add(descriptor)
        return descriptor

    def closed(descriptor: int) -> None:
        text.discard(descriptor)
        os.close(descriptor)

    def synced(descriptor: int) -> None:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        os.fsync(descriptor)

    def binary(call: Callable[..., Any]) -> Callable[..., Any]:
        def checked(descriptor: int, what: Any) -> Any:
            assert descriptor not in text, "a file that is open as text changes the ends of lines"
            return call(descriptor, what)

        return checked

    def link(source: Any, target: Any) -> None:
        raise OSError(errno.ENOSYS, "this disk has no links", source)

    made.__dict__.update(
        name="nt",
        O_BINARY=_BINARY,
        open=opened,
        close=closed,
        fsync=synced,
        read=binary(os.read),
        write=binary(os.write),
        link=link,
    )
    return made


class _Delegating(types.ModuleType):
    """A module with other values for some names."""

    def __init__(self, real: types.ModuleType, **changed: Any):
        super().__init__(real.__name__)
        vars(self).update(_real=real, **changed)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_real"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_real"], name, value)


def _windows_signal() -> types.ModuleType:
    made = types.ModuleType("signal")
    for name in (*_SIGNALS, "SIG_IGN", "SIG_DFL", "signal", "getsignal", "default_int_handler", "raise_signal"):
        setattr(made, name, getattr(signal, name))
    return made


def _is_of_vitral(frame: types.FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] == "vitral"


def _replace_modules() -> None:
    """Give the modules of vitral the modules of Windows."""
    windows = {
        "os": _windows_os(),
        "signal": _windows_signal(),
        "sys": _Delegating(sys, platform="win32"),
        "platform": _Delegating(platform, system=lambda: "Windows"),
    }
    real = builtins.__import__

    def imported(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        if not level and str((globals or {}).get("__name__", "")).partition(".")[0] == "vitral":
            if name.partition(".")[0] in _NO_MODULES:
                raise ModuleNotFoundError(f"No module named '{name}'", name=name)
            if name in windows:
                return windows[name]
        return real(name, globals, locals, fromlist, level)

    builtins.__import__ = imported


def _replace_text_files() -> None:
    """Write and read text as on Windows where vitral says nothing else: cp1252, and two letters at ends of lines."""
    real_open, real_write, real_read = builtins.open, pathlib.Path.write_text, pathlib.Path.read_text

    def opened(file: Any, mode: str = "r", buffering: int = -1, encoding: Any = None, *rest: Any, **more: Any) -> Any:
        if "b" not in mode and _is_of_vitral(sys._getframe(1)):
            encoding = encoding or "cp1252"
            if not rest and set(mode) & set("wax+"):
                more.setdefault("newline", "\r\n")
        return real_open(file, mode, buffering, encoding, *rest, **more)

    def written(self: pathlib.Path, data: str, encoding: Any = None, errors: Any = None, newline: Any = None) -> int:
        if _is_of_vitral(sys._getframe(1)):
            encoding, newline = encoding or "cp1252", newline if newline is not None else "\r\n"
        return real_write(self, data, encoding, errors, newline)

    def read(self: pathlib.Path, encoding: Any = None, errors: Any = None) -> str:
        return real_read(self, encoding or ("cp1252" if _is_of_vitral(sys._getframe(1)) else None), errors)

    builtins.open, pathlib.Path.write_text, pathlib.Path.read_text = opened, written, read  # type: ignore[assignment]


# ---- files


_inside = threading.local()


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    """Refuse what Windows does, in all code of this process: see `sys.addaudithook`."""
    if event not in ("open", "os.rename", "os.remove", "os.mkdir") or getattr(_inside, "busy", False):
        return
    _inside.busy = True
    try:
        paths = [os.fspath(one) for one in arguments[:2] if isinstance(one, str | os.PathLike)]
        if event == "open":
            mode, flags = arguments[1:3]
            if paths and os.path.isdir(paths[0]):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), paths[0])
            if paths and (set(mode or "") & set("wax") or (flags or 0) & os.O_CREAT):
                _check_name(paths[0])
        elif event == "os.mkdir":
            _check_name(paths[0])
        else:
            _check_unused(paths)
            if event == "os.rename":
                _check_name(paths[1])
    finally:
        _inside.busy = False


def _check_name(path: str) -> None:
    if not path.startswith(("/dev/", "/proc/")) and _FORBIDDEN.search(os.path.basename(path)):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)


def _check_unused(paths: list[str]) -> None:
    """Raise PermissionError for a file, or a folder with one, that this process has open or mapped."""
    used = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            used.add(os.readlink(f"/proc/self/fd/{number}"))
    with open("/proc/self/maps", encoding="utf-8") as maps:
        used |= {line.split(maxsplit=5)[5].rstrip() for line in maps if len(line.split()) > 5}
    for path in paths:
        real = os.path.realpath(path)
        if any(one == real or one.startswith(f"{real}/") for one in used):
            raise PermissionError(errno.EACCES, "it is open", path)


def simulate() -> None:
    """Make this process one on Windows, before vitral is imported."""
    import tempfile  # noqa: F401 - with the real `os`, as all libraries

    import torch  # noqa: F401
    import torchvision  # noqa: F401

    shutil._use_fd_functions = False  # type: ignore[attr-defined]  # it would open folders
    multiprocessing.set_start_method("spawn")
    _replace_modules()
    _replace_text_files()
    sys.addaudithook(_refuse)


# ---- commands


def run(words: list[str]) -> dict[str, Any]:
    """Run a command with consoles in cp1252; `serve` until it has answered a request."""
    from vitral.cli import main as cli

    streams = {name: io.TextIOWrapper(io.BytesIO(), "cp1252", newline="\r\n") for name in ("stdout", "stderr")}
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(streams["stdout"]))
        stack.enter_context(contextlib.redirect_stderr(streams["stderr"]))
        cli._usable_streams()
        answers = stack.enter_context(_answers(words)) if words[0] == "serve" else []
        code = cli.main(words)
    said = {}
    for name, stream in streams.items():
        stream.flush()
        said[name] = stream.buffer.getvalue().decode("cp1252").replace("\r\n", "\n")  # type: ignore[attr-defined]
    return {"words": words, "code": code, "answers": answers, **said}


@contextlib.contextmanager
def _answers(words: list[str]) -> Iterator[list[int]]:
    """Ask the server for its health until it answers, then press Ctrl-C."""
    found: list[int] = []
    url = f"http://127.0.0.1:{words[words.index('--port') + 1]}/readyz"

    def ask() -> None:
        import time

        for _ in range(300):
            with contextlib.suppress(OSError):
                found.append(urllib.request.urlopen(url, timeout=5).status)
                break
            time.sleep(0.1)
        signal.raise_signal(signal.SIGINT)

    thread = threading.Thread(target=ask)
    thread.start()
    yield found
    thread.join()


if __name__ == "__main__":
    os.chdir(sys.argv[1])
    given = json.load(sys.stdin)
    simulate()
    results = [run(words) for words in given]
    json.dump(results, sys.stdout)
