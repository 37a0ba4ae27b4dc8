"""Completion scripts for bash, zsh and fish, written from the table of commands.

A script contains every command, option and choice as text. No Python starts at the press of Tab.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from vitral.cli.options import Option


@dataclass(frozen=True)
class Command:
    """A command as completion sees it."""

    name: str
    """One word, or two: `data check`."""
    help: str
    options: Sequence[Option]

    @property
    def words(self) -> list[str]:
        return self.name.split()

    @property
    def flags(self) -> dict[str, Option]:
        """Each flag with its option; switches that are on by default have one more, which turns them off."""
        named = [option for option in self.options if not option.is_positional]
        on = [option for option in named if option.is_switch and option.default is not False]
        return {option.title: option for option in named} | {option.negation: option for option in on}

    @property
    def choices(self) -> list[str]:
        """The words that a positional argument is chosen from; empty where it may be a file."""
        return [word for option in self.options if option.is_positional for word in get_args(option.values.element)]


def script(shell: str, commands: Sequence[Command]) -> str:
    """Return the text that `shell` (`bash`, `zsh` or `fish`) evaluates to complete `vitral`."""
    return "\n".join(_SHELLS[shell](commands)) + "\n"


def _families(commands: Sequence[Command]) -> dict[str, list[str]]:
    """First word of each command → the second words that may follow it; empty for a command of one word."""
    families: dict[str, list[str]] = {}
    for command in commands:
        families.setdefault(command.words[0], []).extend(command.words[1:])
    return families


def _bash(commands: Sequence[Command]) -> Iterator[str]:
    families = _families(commands)
    yield "_vitral() {"
    yield "  local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} command=${COMP_WORDS[1]} found="
    yield "  COMPREPLY=()"
    yield f'  if (( COMP_CWORD == 1 )); then found="{" ".join(families)} --help --version"; fi'
    yield '  case "$command" in'
    for family, seconds in families.items():
        if seconds:
            yield f'    {family}) if (( COMP_CWORD == 2 )); then found="{" ".join(seconds)}"; fi'
            yield '      command+=" ${COMP_WORDS[2]}";;'
    yield "  esac"
    yield '  case "$command" in'
    for command in commands:
        yield f'    "{command.name}")'
        yield f"      if (( COMP_CWORD > {len(command.words)} )); then"
        yield f'        if [[ $word == -* ]]; then found="--help {" ".join(command.flags)}"'
        yield f'        else found="{" ".join(command.choices)}"'
        yield '          case "$before" in'
        for option in command.options:
            if choices := get_args(option.values.element):
                yield f'            {option.title}) found="{" ".join(choices)}";;'
        yield "          esac; fi; fi;;"
    yield "  esac"
    yield '  COMPREPLY=($(compgen -W "$found" -- "$word"))'
    yield "}"
    yield "complete -o default -o bashdefault -F _vitral vitral"  # files where no word of vitral fits


def _zsh(commands: Sequence[Command]) -> Iterator[str]:
    families = _families(commands)
    help = {command.name: command.help for command in commands}
    yield "#compdef vitral"
    yield "_vitral() {"
    yield "  local -a names"
    yield "  if (( CURRENT == 2 )); then"
    about = [_zsh_pair(family, help.get(family, ", ".join(seconds))) for family, seconds in families.items()]
    yield f"    names=({' '.join(about)})"
    yield "    _describe command names; return"
    yield "  fi"
    yield "  case $words[2] in"
    for family, seconds in families.items():
        if seconds:
            about = [_zsh_pair(second, help[f"{family} {second}"]) for second in seconds]
            yield f"    {family}) names=({' '.join(about)})"
            yield "      if (( CURRENT == 3 )); then _describe command names; return; fi"
            yield '      words[2]="$words[2] $words[3]"; words[3]=(); (( CURRENT-- ));;'
    yield "  esac"
    yield '  local command="$words[2]"; shift words; (( CURRENT-- ))'
    yield '  case "$command" in'
    for command in commands:
        positional = f"({' '.join(command.choices)})" if command.choices else "_files"
        about = [_quoted(f"*:argument:{positional}"), "'--help[show help]'", *_zsh_flags(command)]
        yield f'    "{command.name}") _arguments {" ".join(about)};;'
    yield "  esac"
    yield "}"
    yield "compdef _vitral vitral"


def _zsh_pair(word: str, help: str) -> str:
    return _quoted(f"{word}:{_zsh_text(help)}")


def _zsh_flags(command: Command) -> Iterator[str]:
    for flag, option in command.flags.items():
        yield _quoted(
            f"{flag}[{_zsh_text(option.help)}]" + ("" if option.is_switch else f":value:{_zsh_values(option)}")
        )


def _zsh_values(option: Option) -> str:
    element = option.values.element
    return f"({' '.join(choices)})" if (choices := get_args(element)) else "_files" if element is str else " "


def _zsh_text(text: str) -> str:
    return text.replace("\\", "\\\\").replace("[", "\\[").replace("]", "\\]").replace(":", "\\:")


def _fish(commands: Sequence[Command]) -> Iterator[str]:
    help = {command.name: command.help for command in commands}
    for family, seconds in _families(commands).items():
        about = help.get(family, ", ".join(seconds))
        yield f"complete -c vitral -n __fish_use_subcommand -f -a {family} -d {_quoted(about)}"
        for second in seconds:
            begun = f"__fish_seen_subcommand_from {family}; and not __fish_seen_subcommand_from {' '.join(seconds)}"
            yield f"complete -c vitral -n '{begun}' -f -a {second} -d {_quoted(help[f'{family} {second}'])}"
    for command in commands:
        begun = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in command.words)
        start = f"complete -c vitral -n '{begun}'"
        if command.choices:
            yield f"{start} -f -a {_quoted(' '.join(command.choices))}"
        for flag, option in command.flags.items():
            yield f"{start} -l {flag[2:]} {_fish_values(option)}-d {_quoted(option.help)}"


def _fish_values(option: Option) -> str:
    if option.is_switch:
        return ""
    if choices := get_args(option.values.element):
        return f"-x -a {_quoted(' '.join(choices))} "
    return "-r " if option.values.element is str else "-x "


def _quoted(text: str) -> str:
    return shlex.quote(text)


_SHELLS: Mapping[str, Callable[[Sequence[Command]], Iterator[str]]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
