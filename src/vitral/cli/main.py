"""The command line: a table of commands, and errors as exit codes.

Results go to standard output (as JSON with `--format json`), everything else to standard error. Exit codes: 0 success;
1 part of the work failed, and each failure is reported; 2 the request cannot be carried out; 130 stopped by Ctrl-C,
after saving.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Annotated, Literal, NoReturn

from vitral import activity
from vitral.cli import ranks
from vitral.cli.bench import bench
from vitral.cli.data import data_cache, data_check, data_shard
from vitral.cli.demo import demo
from vitral.cli.embed import embed, similar
from vitral.cli.evaluate import evaluate
from vitral.cli.explain import explain, inspect
from vitral.cli.export import export
from vitral.cli.help import HELP_ALL, first_line, help_page, overview
from vitral.cli.label import label
from vitral.cli.options import Help, Option, options_of
from vitral.cli.output import program, say
from vitral.cli.parsing import parse
from vitral.cli.predict import predict
from vitral.cli.pretrain import pretrain, pretrain_options
from vitral.cli.push import push
from vitral.cli.replay import replay
from vitral.cli.serve import serve
from vitral.cli.study import compare, reproduce, study_compute, study_data, study_options, study_resume
from vitral.cli.train import train, train_options
from vitral.cli.tune import tune
from vitral.cli.weights import convert, models, quantize, summary, verify
from vitral.console import stdout
from vitral.distributed.environment import is_follower, launched, with_nproc
from vitral.errors import Elsewhere, Interrupted, RankError, VitralError, VitralWarning, unknown
from vitral.filesystem import is_write_error, refused
from vitral.folders import settle_caches
from vitral.imports import import_failure
from vitral.spoken import shell
from vitral.stopping import stop_raises


def completion(shell: Annotated[Literal["bash", "zsh", "fish"], Help("bash, zsh or fish", "SHELL")]) -> int:
    """Print the completion script of a shell, which completes commands, options and their values.

    For bash: echo 'eval "$(vitral completion bash)"' >> ~/.bashrc
    For zsh: echo 'eval "$(vitral completion zsh)"' >> ~/.zshrc, after compinit
    For fish: vitral completion fish > ~/.config/fish/completions/vitral.fish
    """
    from vitral.cli.completion import Command, script

    print(script(shell, [Command(name, first_line(of), _options(of)) for name, of in COMMANDS.items()]), end="")
    return 0


COMMANDS: dict[str, Callable[..., int]] = {
    "demo": demo,
    "label": label,
    "train": train,
    "pretrain": pretrain,
    "evaluate": evaluate,
    "compare": compare,
    "study data": study_data,
    "study compute": study_compute,
    "study options": study_options,
    "study resume": study_resume,
    "tune": tune,
    "reproduce": reproduce,
    "replay": replay,
    "predict": predict,
    "embed": embed,
    "similar": similar,
    "explain": explain,
    "inspect": inspect,
    "serve": serve,
    "summary": summary,
    "models": models,
    "convert": convert,
    "quantize": quantize,
    "export": export,
    "push": push,
    "data check": data_check,
    "data shard": data_shard,
    "data cache": data_cache,
    "verify": verify,
    "bench": bench,
    "completion": completion,
}


_TRAINING = {"train", "pretrain", "study", "tune", "reproduce"}
"""First words of commands that save what they have trained when they are stopped."""


_AT_ONCE = {"predict", "summary", "models", "convert", "completion"}
"""First words of commands that say in a log nothing but results and failures, unless they write with --out."""


def run() -> NoReturn:
    """Run the command line as the whole work of this process.

    A rank ends without the teardown of the interpreter: a thread of Gloo that still returns the tensors of the last
    collective needs the interpreter, and aborts a process whose interpreter is going.
    """
    _usable_streams()
    code = main(logged=True)
    if launched():
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _usable_streams() -> None:
    """Open closed streams (`>&-`) as the null device; let streams replace characters that their encoding lacks."""
    for name in ("stdout", "stderr"):
        if (stream := getattr(sys, name)) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - for the life of the process
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


@shell()
def main(argv: Sequence[str] | None = None, *, logged: bool = False) -> int:
    """Run one command and return its exit code; no traceback without `--debug`. If `logged`, long commands say what
    they are doing also where standard error is no terminal.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if launched():  # torch would print its own stack when another rank ends; it reads this when it is imported
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    warnings.filterwarnings("ignore", category=VitralWarning)  # the commands print these notes
    warnings.filterwarnings("ignore", module=r"vitral\.")  # of libraries, at lines of vitral
    if not debug:  # Pillow warns about unusual metadata in each image
        warnings.filterwarnings("ignore", module=r"PIL\.")
    try:
        with stop_raises() if {*words[:1]} & _TRAINING else contextlib.nullcontext():
            code = _dispatch(words, debug, logged)
        sys.stdout.flush()  # inside the try, so that a closed pipe is caught below
        return code
    except Elsewhere as failed:
        return failed.exit_code
    except Interrupted as stopped:
        if is_follower():
            return 0
        status = "Stopped and saved. To resume" if stopped.saved else "Stopped before anything was saved. To restart"
        say(f"\n{status}:\n  {program()}{with_nproc(stopped.command.removeprefix('vitral'))}")
        return 0 if launched() and stopped.saved else stopped.exit_code  # a launcher ends all ranks at any other code
    except KeyboardInterrupt:
        if not is_follower():
            say("\nStopped.")
        return 130
    except BrokenPipeError:  # `vitral models | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if debug:
            raise
        refusal = error if isinstance(error, VitralError) else _as_refusal(error)
        if is_follower() and not isinstance(refusal, RankError):  # all ranks have read the same words
            return refusal.exit_code
        say(f"error: {refusal}")
        return refusal.exit_code
    finally:
        activity.close()


def _dispatch(words: list[str], debug: bool, logged: bool) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview(COMMANDS))
        return 0
    if words[0] == "--version":
        import vitral

        print(f"vitral {vitral.__version__}")
        return 0
    name, rest = " ".join(words[:2]), words[2:]
    if name not in COMMANDS:
        name, rest = words[0], words[1:]
    if name not in COMMANDS:
        raise _unknown_command(words)
    command = COMMANDS[name]
    if not (is_follower() or name in _SILENT or {"--quiet", *_HELP} & {*rest}):
        activity.begin(f"vitral {name}: starting", logged=logged and (words[0] not in _AT_ONCE or "--out" in rest))
    if (note := settle_caches()) and not (is_follower() or "--quiet" in rest):
        say(f"note: {note}")
    options = _options(command)
    if not {*_HELP}.isdisjoint(rest):
        stdout().print(help_page(name, command, options, whole=HELP_ALL in rest), soft_wrap=True, highlight=False)
        return 0
    return ranks.run(name, options, parse(name, options, rest), command, debug)


_HELP = ("-h", "--help", HELP_ALL)
_SILENT = ("completion", "label", "serve")
"""Commands that say by themselves what they do."""


_OF_RUNS: dict[Callable[..., int], Callable[[], list[Option]]] = {train: train_options, pretrain: pretrain_options}
"""Commands whose options are fields of `Run`."""


def _options(command: Callable[..., int]) -> list[Option]:
    if command in _OF_RUNS:
        return _OF_RUNS[command]()
    return ranks.shared_options(command) if command.__name__ in ranks.AGAIN else options_of(command)


def _unknown_command(words: Sequence[str]) -> VitralError:
    name = words[0]
    if family := [command for command in COMMANDS if command.startswith(f"{name} ")]:
        typed = " ".join(word for word in words[:2] if not word.startswith("-"))
        return unknown("command", typed, family, hint=f"vitral {family[0]} --help")
    if name.startswith("-"):
        return unknown("option", name, ("--help", "--version"), hint="vitral --help")
    return unknown("command", name, COMMANDS, hint="vitral --help")


_PATH_ERRORS = (errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)
"""System errors caused by a path from the command line; any other one is a bug in vitral."""


def _as_refusal(error: Exception) -> VitralError:
    """Convert an unexpected exception to an error for the user."""
    if failed := import_failure(error):
        return failed
    if isinstance(error, OSError) and error.errno in _PATH_ERRORS and error.filename is not None:
        return VitralError("cannot access this path", where=error.filename, why=error.strerror)
    if isinstance(error, OSError) and (is_write_error(error) or "No usable temporary directory" in str(error)):
        return refused(error.filename, error, "TMPDIR=FOLDER names another place for temporary files")
    message = " ".join(str(error).split())[:300]
    if _out_of_memory(error):
        hint = "use a smaller batch, smaller images or a smaller network; if a GPU is full, --device cpu"
        return VitralError("not enough memory", why=message or None, hint=hint)
    hint = "re-run with --debug and please report it"
    return VitralError(f"{type(error).__name__}: {message}", why="this is a bug in vitral", hint=hint)


def _out_of_memory(error: Exception) -> bool:
    if "torch" not in sys.modules:  # an error before torch was imported does not wait for it
        return isinstance(error, MemoryError)
    from vitral.device import out_of_memory

    return out_of_memory(error)
