"""`vitral compare` and `vitral study`: questions that take several networks."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from vitral.cli.options import DataRoot, Device, Format, Help, Precision
from vitral.cli.output import print_json, print_notes, print_text, program, say
from vitral.console import command_line, counting, stderr, stdout, table
from vitral.digest import check
from vitral.errors import UsageError, unknown
from vitral.evaluation.page_numbers import compact
from vitral.wording import flag

if TYPE_CHECKING:
    from rich.table import Table

    from vitral.studies.comparison import Comparison
    from vitral.studies.results import Results
    from vitral.studies.spans import Span
    from vitral.studies.study import Study, StudyFolder


_PAGE = "comparison.html"
"""Page of `vitral compare` by default."""


def compare(
    runs: Annotated[tuple[str, ...], Help("run folders or weights files, two or more", "RUN RUN …")] = (),
    *,
    data: Annotated[str | None, Help("images to compare on (default: those held out of all the runs)")] = None,
    split: Annotated[str | None, Help("train, val or test (default: test, otherwise val or all images)")] = None,
    data_root: DataRoot = "data",
    out: Annotated[
        str | None,
        Help("HTML page, with the images that only one network classifies correctly (default: comparison.html)"),
    ] = None,
    device: Device = "auto",
    precision: Precision = "auto",
    format: Format = "text",
) -> int:
    """Compare networks on the same held-out images: accuracy, significance of differences, speed, size."""
    if out and Path(out).is_dir():
        hint = f"--out {shlex.quote(os.path.join(out, 'comparison.html'))}"
        raise UsageError("--out is a file, and this is a folder", where=out, hint=hint)
    from vitral.studies.comparison import compare as compare_networks

    with counting(stderr(), "reading the images") as progress:
        found = compare_networks(
            runs, data, split=split, data_root=data_root, device=device, precision=precision, progress=progress
        )
    if format == "json":
        print_json(found.to_json())
    else:
        _print(found)
    print_notes(found.notes())
    page = Path(out or _PAGE)
    if out is None and page.exists() and not check(page.read_bytes()):
        say(f"note: {page} was not written by vitral, and is kept: --out names another page")
    elif out or format == "text":
        from vitral.studies.page import write_comparison

        typed = {"data": data, "split": split, "device": device, "precision": precision, "out": out}
        given = {name: value for name, value in typed.items() if value not in (None, "auto")}
        write_comparison(page, found, command_line("compare", runs, given))
        say(f"Report   {page}")
    return 0


def _print(found: Comparison) -> None:
    from vitral.studies.page import p_value

    where = "" if found.split == "all" else f"{found.split} "
    print_text(f"{found.counted(f'{where}image')} of {found.source}")
    print_text(f"{found.conclusion()}\n")
    networks = _columns("network", "accuracy (95%)", "ECE", "weights", "images/s", "ms/image", "uniquely correct")
    for place, one in enumerate(found.contenders):
        low, high = one.evaluation.accuracy_interval
        networks.add_row(
            one.name,
            f"{one.evaluation.accuracy:.2%} ({low:.1%} to {high:.1%})",
            f"{one.evaluation.ece:.1%}",
            compact(one.parameters),
            f"{one.images_per_second:,.0f}",
            f"{1000 * one.seconds_per_image:.2f}",
            str(len(found.only_right(place))),
        )
    stdout().print(networks)
    pairs = _columns("first − second", "points (95%)", "only first", "only second", "agreement", "p (Holm)")
    for pair in found.differences:
        low, high = pair.interval
        pairs.add_row(
            f"{pair.first} − {pair.second}",
            f"{100 * pair.difference:+.2f} ({100 * low:+.2f} to {100 * high:+.2f})",
            str(pair.only_first),
            str(pair.only_second),
            f"{pair.agreement:.1%}",
            p_value(pair.p_adjusted),
        )
    print_text("")
    stdout().print(pairs)


def _columns(*headings: str) -> Table:
    """Make a table of names and figures. Intervals are not wrapped; a long name is, to be read whole."""
    found = table()
    found.add_column(headings[0], overflow="fold")
    for heading in headings[1:]:
        found.add_column(heading, justify="right", no_wrap="95%" in heading)
    return found


Data = Annotated[str, Help("images: a folder, a table, an archive or a named set, as for vitral train", "DATA")]
Models = Annotated[tuple[str, ...], Help("networks by name: S/16, R26+S/32, BiT-R50x1, timm:NAME, torchvision:NAME")]
Seeds = Annotated[int, Help("runs of each recipe, which show how much chance changes")]
Minutes = Annotated[float | None, Help("time for training and validation of all runs together, shared out equally")]
Set = Annotated[tuple[str, ...], Help("options of vitral train for every run: epochs=20 augment=none")]
Out = Annotated[str | None, Help("folder of the study (default: studies/NAME-KIND)")]


def study_data(
    data: Data,
    *,
    models: Models = (),
    fractions: Annotated[tuple[float, ...], Help("fractions of the training images")] = (0.1, 0.25, 0.5, 1.0),
    seeds: Seeds = 3,
    minutes: Minutes = None,
    set_: Set = (),
    data_root: DataRoot = "data",
    out: Out = None,
    format: Format = "text",
) -> int:
    """Measure accuracy against the amount of training data, on the same held-out images.

    The same command continues a study that was stopped; more models, fractions or seeds extend it.
    """
    shared = fixed(set_, data_root)
    return _study(
        {
            "kind": "data",
            "data": data,
            "models": models,
            "fractions": fractions,
            "seeds": seeds,
            "minutes": minutes,
            "options": shared,
        },
        out,
        format,
    )


def study_compute(
    data: Data,
    *,
    models: Models = (),
    epochs: Annotated[tuple[int, ...], Help("lengths of training")] = (1, 3, 10),
    seeds: Seeds = 3,
    set_: Set = (),
    data_root: DataRoot = "data",
    out: Out = None,
    format: Format = "text",
) -> int:
    """Measure accuracy against the FLOPs and the seconds of training, with the Pareto front.

    The same command continues a study that was stopped; more models, lengths or seeds extend it.
    """
    shared = fixed(set_, data_root)
    return _study(
        {"kind": "compute", "data": data, "models": models, "epochs": epochs, "seeds": seeds, "options": shared},
        out,
        format,
    )


def study_options(
    data: Data,
    *,
    vary: Annotated[
        tuple[str, ...],
        Help(
            "options of vitral train with their values, or with --trials their range: lr=1e-5..1e-2 augment=none,affine"
        ),
    ] = (),
    trials: Annotated[
        int | None, Help("search by so many runs (Optuna), each drawn from the results before it, instead of a grid")
    ] = None,
    seeds: Annotated[int | None, Help("runs of each recipe (default: 3, or 1 with --trials)")] = None,
    minutes: Minutes = None,
    set_: Set = (),
    data_root: DataRoot = "data",
    out: Out = None,
    format: Format = "text",
) -> int:
    """Compare all combinations of some training options; with --trials, search for the best one.

    The same command continues a study that was stopped; more values, seeds or trials extend it.
    """
    varied = {name: _values(name, words) for name, words in _pairs("vary", vary)}
    common = {"data": data, "vary": varied, "minutes": minutes, "options": fixed(set_, data_root)}
    if trials is None:
        return _study({"kind": "options", "seeds": 3 if seeds is None else seeds, **common}, out, format)
    from vitral.studies.sampling import check_installed

    check_installed()
    return _study({"kind": "search", "seeds": seeds or 1, "trials": trials, **common}, out, format)


def study_resume(
    study: Annotated[str, Help("folder of a study", "STUDY")],
    *,
    format: Format = "text",
) -> int:
    """Continue a study that was stopped, and write its page again."""
    from vitral.studies.study import StudyFolder

    return carry_out(StudyFolder(study).read(), study, format)


def _study(choices: dict[str, Any], out: str | None, format: str) -> int:
    from vitral.studies.designs import DESIGNS

    design = DESIGNS[choices["kind"]]
    if not choices[design.needs]:
        option = flag(design.needs)
        raise UsageError(f"vitral study {design.command} needs {option}", hint=f"{option} {design.example}")
    from vitral.studies.study import Study

    default = os.path.join("studies", f"{Path(choices['data']).stem or 'data'}-{choices['kind']}")
    return carry_out(Study.from_json(choices), out or default, format)


def carry_out(study: Study, folder: str, format: str) -> int:
    """Run a study, print its results and write its page; return the exit code."""
    from vitral.studies.page import write_study
    from vitral.studies.running import run_study
    from vitral.studies.study import StudyFolder

    results = run_study(study, folder, tell=say)
    place = StudyFolder(folder)
    write_study(place, results)
    if format == "json":
        print_json(results.to_json())
    else:
        _print_study(results)
    say(f"\nReport   {place.page}")
    if study.design.searches:
        _print_winner(place, results)
    return 0 if results.finished else 1


def _print_study(results: Results) -> None:
    from vitral.studies.conclusions import conclusions

    if results.study.design.searches:
        _print_trials(results)
    else:
        _print_groups(results)
    print_text("")
    for sentence in conclusions(results):
        print_text(sentence)


def _print_trials(results: Results) -> None:
    """Print a row for each trial, the best first."""
    from vitral.studies.study import shown

    rows = _columns("trial", *results.study.factors, "validation accuracy", "epochs", "seconds", "")
    for one in results.ranked:
        accuracy = "–" if one.accuracy is None else f"{one.accuracy:.2%}"
        seconds = "" if one.seconds is None else f"{one.seconds:.3g}"
        status = {"done": "", "pruned": "stopped early"}.get(one.status, one.status)
        own = [shown(value) for value in one.cell.factors.values()]
        rows.add_row(one.cell.name, *own, accuracy, str(one.epochs or ""), seconds, status)
    stdout().print(rows)


def _print_winner(place: StudyFolder, results: Results) -> None:
    """Print the winner's weights, the command that trains it again, and the one that compares it with the plan."""
    best = results.best
    if best is None:
        return
    from vitral.pretraining.methods import command

    say(f"Winner   {place.cell(best.cell)}")
    say(f"\nNext:\n  {command(best.cell.options).replace('vitral', program(), 1)}")
    first = results.outcomes[0]
    if results.study.first and first.done and first is not best:
        runs = shlex.join(map(str, (place.cell(best.cell), place.cell(first.cell))))
        say(f"  {program()} compare {runs}")


def _print_groups(results: Results) -> None:
    """Print a row for each combination of factors: its mean over seeds."""
    from vitral.studies.study import shown

    rows = table()
    for factor in results.study.factors:
        rows.add_column(factor, no_wrap=True)
    for heading in ("accuracy (95%)", "seeds", "parameters", "FLOPs", "seconds"):
        rows.add_column(heading, justify="right", no_wrap=True)
    for group in results.groups:
        accuracy, figures = "–", [group.mean(name) for name in ("parameters", "flops", "seconds")]
        if group.accuracy:
            low, high = group.accuracy.interval
            interval = f" ({low:.1%} to {high:.1%})" if group.accuracy.seeds > 1 else ""
            accuracy = f"{group.accuracy.value:.2%}{interval}"
        own = [shown(value) for value in group.factors.values()]
        cells = [compact(figure) if figure is not None else "" for figure in figures]
        rows.add_row(*own, accuracy, str(len(group.done)), *cells)
    stdout().print(rows)


def fixed(words: tuple[str, ...], data_root: str) -> dict[str, object]:
    """Options that all runs share."""
    fixed = {name: _value(name, value) for name, value in _pairs("set", words)}
    return fixed if data_root == "data" else {"data_root": data_root, **fixed}


def _pairs(option: str, words: tuple[str, ...]) -> list[tuple[str, str]]:
    """Split NAME=VALUE; `UsageError` for anything else, and for a name that comes twice."""
    found = list[tuple[str, str]]()
    for word in words:
        name, equals, value = word.partition("=")
        if not (name and equals and value):
            raise UsageError(f"--{option} takes NAME=VALUE, not '{word}'", hint=f"--{option} lr=1e-3")
        if name.replace("-", "_") in dict(found):
            raise UsageError(f"--{option} names {name} twice", hint="name each once")
        found.append((name.replace("-", "_"), value))
    return found


def _values(name: str, words: str) -> tuple[object, ...] | Span:
    """Convert a list with commas, or a range with two dots."""
    from vitral.studies.spans import Span

    low, dots, high = words.partition("..")
    if dots and low and high and "," not in words:
        return Span.of(name, _value(name, low), _value(name, high))
    return tuple(_value(name, one) for one in words.split(","))


def _value(name: str, word: str) -> object:
    """Convert a word as vitral train does; a switch is on or off, a size HEIGHTxWIDTH."""
    from vitral.cli.parsing import parse
    from vitral.cli.train import train_options

    options = {one.name: one for one in train_options() if not one.is_positional}
    if name not in options:
        raise unknown("option of vitral train", name, options)
    option = options[name]
    if option.is_switch:
        if word not in ("on", "off"):
            raise UsageError(f"{name} is on or off, not '{word}'", hint=f"{name}=on")
        words = [option.title if word == "on" else option.negation]
    else:
        many = option.values.most > 1 and option.values.element in (int, float)
        words = [option.title, *(word.split("x") if many else [word])]
    return parse("train", list(options.values()), words)[name]


def reproduce(
    name: Annotated[str, Help("study of the paper; by default all are listed", "[NAME]")] = "",
    *,
    scale: Annotated[Literal["laptop", "full"], Help("size of networks and data")] = "laptop",
    data: Annotated[str | None, Help("images to use instead of those that belong to the scale")] = None,
    seeds: Annotated[int | None, Help("runs of each recipe (default: 3)")] = None,
    set_: Set = (),
    data_root: DataRoot = "data",
    out: Annotated[str | None, Help("folder of the study (default: studies/paper-NAME-SCALE)")] = None,
    format: Format = "text",
) -> int:
    """Test a claim of the ViT paper with a small study of your own."""
    from vitral.studies.paper import names, paper_study

    if name:
        study = paper_study(name, scale, data=data, seeds=seeds, options=fixed(set_, data_root))
        return carry_out(study, out or os.path.join("studies", f"paper-{name}-{scale}"), format)
    studies = {one: paper_study(one, scale) for one in names()}
    if format == "json":
        print_json({one: {"claim": study.claim, "runs": len(study.cells)} for one, study in studies.items()})
        return 0
    rows = table()
    for heading in ("name", "claim", "runs"):
        rows.add_column(heading, justify="right" if heading == "runs" else "left")
    for one, study in studies.items():
        rows.add_row(one, study.claim, str(len(study.cells)))
    stdout().print(rows)
    return 0
