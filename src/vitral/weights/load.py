"""Any published weights in: from a path or a hub's name to our own weights and the account of every tensor."""

from __future__ import annotations

import copy
import dataclasses
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitral.data.transforms import Preprocessing
from vitral.errors import RunError, UsageError, WeightsError, empty, nearest, unknown
from vitral.model import ModelConfig, Network, ViTConfig, network
from vitral.weights import hub, labels, native
from vitral.weights.account import Account, Line
from vitral.weights.adapt import adapt
from vitral.weights.formats import FORMATS, detect
from vitral.weights.formats.format import Format
from vitral.weights.infer import infer
from vitral.weights.keymap import fits
from vitral.weights.native import Weights
from vitral.weights.references import DEMO, holds_weights, is_demo, is_run
from vitral.weights.resize import SCHEMES
from vitral.weights.source import Source, non_finite, open_source

_KINDS = "a run folder, a file, timm:NAME, hf:ORG/NAME or demo"

CHANGES = ("image_size", "patch_size", "channels", "classes")
"""Fields of the configuration that weights can be made to fit."""


@dataclass(frozen=True, eq=False)
class Loaded:
    """Weights of ours and where each of them came from."""

    weights: Weights
    account: Account
    format: str
    reference: str
    """What was asked for; a hub's reference with the revision that was fetched."""
    empty: list[Network] = field(default_factory=list)
    """The network without numbers that the weights were held against, until it is built from them."""

    def build(self) -> Network:
        """The network with these weights, as `native.build` makes it."""
        return native.build(self.weights, empty=self.empty.pop() if self.empty else None)


def read(
    reference: str | Path,
    *,
    format: str | None = None,
    heads: int | None = None,
    scheme: str | None = None,
    new_head: bool = False,
    **changes: Any,
) -> Loaded:
    """Read weights of any known format.

    `reference` is a run folder, a file, a folder as hubs keep them, `timm:NAME`, `hf:ORG/NAME` or `demo`. `changes`
    are `image_size`, `patch_size`, `channels` and `classes` that the network should have instead; positions are resized
    by `scheme`, by default the one that the weights' origin uses. `format` and `heads` say what could not be found out.

    Raises `WeightsError` for what is damaged, foreign or does not fit, and `UsageError` for another number of classes
    unless `new_head` asks for it.
    """
    if bad := [name for name in changes if name not in CHANGES]:
        raise unknown("change of weights", bad[0], CHANGES)
    wanted = {name: value for name, value in changes.items() if value is not None}
    path, notes, pinned = locate(reference)
    source = open_source(path)
    source = dataclasses.replace(source, where=str(reference))
    if "vitral" in source.metadata:
        (weights, account), kind, empty = _native(path, source), "native", list[Network]()
    else:
        kind, weights, account, empty = _foreign(source, format, heads, wanted.get("image_size"))
    account.notes[:0] = [*notes, *source.notes]
    if bad := non_finite(source.tensors):
        account.notes.append(f"values that are not finite in {', '.join(bad[:3])}")
    return fit(Loaded(weights, account, kind, pinned, empty), scheme=scheme, new_head=new_head, **wanted)


def unfinished(reference: str | Path) -> str:
    """What to say of a run that has weights and has not ended; empty of all others."""
    path = Path(reference)
    if hub.is_reference(str(reference)) or not (path.is_dir() and is_run(path)) or (path / "result.json").is_file():
        return ""
    more = f"vitral train --out {shlex.quote(str(path))} --resume"
    return f"the run has not ended, and these are its best weights so far: {more}"


def locate(reference: str | Path) -> tuple[Path, list[str], str]:
    """Where the weights lie that are asked for: the path, notes on how it was found, and the reference, pinned.

    `RunError` for a run without weights and for a folder that holds neither a run nor weights, `UsageError` for an
    empty reference.
    """
    text = str(reference)
    if not text:
        raise empty("RUN or WEIGHTS", _KINDS)
    if hub.is_reference(text):
        fetched = hub.resolve(text)
        return fetched.path, [f"fetched revision {fetched.revision}"], fetched.reference
    if is_demo(reference):
        return DEMO, [], text
    path = Path(reference)
    if path.is_dir() and is_run(path):
        weights = path / "model.safetensors"
        learned = (file for file in (path / "result.json", path / "metrics.jsonl") if file.is_file())
        if not weights.is_file() and any(file.stat().st_size for file in learned):  # there may be no epoch in it yet
            hint = "put it back, or type the command in config.json again, with --overwrite"
            raise RunError("the run's weights are gone", where=weights, why="it has learned, and had them", hint=hint)
        if not weights.is_file():
            hint = f"vitral train --out {path} --resume"
            raise RunError("the run has no weights yet", where=path, why="it stopped in its first epoch", hint=hint)
        return weights, [], text
    if path.is_dir() and not holds_weights(path):
        raise RunError("not a run folder", where=path, why="it holds neither a run nor weights", hint="ls runs")
    if not path.exists():
        raise WeightsError("no such run or weights", where=path, why=_nearest(path), hint=_KINDS)
    return path, [], text


def _nearest(path: Path) -> str | None:
    """What lies beside it under a name that is nearly the same; None where nothing does."""
    try:
        names = [one.name for one in path.parent.iterdir()]
    except OSError:
        return None
    near = nearest(path.name, names)
    return f"nearest: {', '.join(str(path.parent / name) for name in near)}" if near else None


def _native(path: Path, source: Source) -> tuple[Weights, Account]:
    weights = native.read(path if path.is_file() else path / "model.safetensors")
    lines = [Line(name, tuple(t.shape), "loaded", name) for name, t in weights.state.items()]
    return weights, Account(source.where, "vitral's own", lines)


def _foreign(
    source: Source, format: str | None, heads: int | None, image_size: int | tuple[int, int] | None
) -> tuple[str, Weights, Account, list[Network]]:
    if format is not None and format not in FORMATS:
        raise unknown("format", format, FORMATS)
    kind = FORMATS[format] if format else detect(source.tensors, source.where)
    state, account = _translate(kind, source)
    facts = kind.facts(source) | ({"heads": heads} if heads else {})
    try:
        if kind.config:
            config = kind.config(state, facts, source.where)
        else:
            config = infer(state, facts, source.where, image_size)
    except (IndexError, TypeError) as error:  # a tensor with too few axes
        raise WeightsError("tensors of the wrong shape", where=source.where, why=str(error)) from None
    except UsageError as error:
        if heads:
            raise
        raise WeightsError("tensors of no network that there is", where=source.where, why=error.what) from None
    empty = _check(state, config, account, source.where)
    if isinstance(config, ViTConfig) and facts.get("heads") is None and not config.qk_norm:
        account.notes.append(f"{config.heads} heads, as published networks of this width have; else give --heads")
    account.notes += kind.assumed(source)
    preprocessing, known_from = kind.preprocessing(source, config)
    account.notes.append(f"pictures prepared as {_told(preprocessing)} ({known_from})")
    preprocessing = _prepared(preprocessing, config)
    names = kind.classes(source, config.classes)
    if names is None or len(names) != config.classes:
        names = labels.default(config.classes)
    trained = {"origin": source.where, "format": kind.name}
    return kind.name, Weights(config, state, preprocessing, names, trained), account, [empty]


def _translate(kind: Format, source: Source) -> tuple[dict[str, Tensor], Account]:
    """Tensors under our names, and what became of each of theirs."""
    theirs = kind.canonical(dict(source.tensors))
    as_in_file = {id(tensor): name for name, tensor in source.tensors.items()}
    said = {name: as_in_file.get(id(tensor), name) for name, tensor in theirs.items()}  # parts of a stack are new
    account = Account(source.where, kind.name)
    state: dict[str, Tensor] = {}
    used: dict[str, Line] = {}
    for match in kind.keymap.reading(name for name, tensor in theirs.items() if tensor.numel()):
        try:
            state[match.ours] = match.form.read([theirs[name] for name in match.theirs])
        except (RuntimeError, IndexError, ValueError) as error:
            shapes = ", ".join(f"{name} {tuple(theirs[name].shape)}" for name in match.theirs)
            raise WeightsError(
                "tensors that do not go together", where=source.where, why=f"{shapes}: {error}"
            ) from None
        for name in match.theirs:
            fate = "transformed" if match.form.told else "loaded"
            used[name] = Line(said[name], tuple(theirs[name].shape), fate, match.ours, match.form.told)  # type: ignore[arg-type]
    for name, tensor in theirs.items():
        why = next((why for pattern, why in kind.ignored.items() if fits((pattern,), name)), None)
        why = why if tensor.numel() else "it is empty"  # as the registers of a network without any
        if name not in used and why is None:
            raise WeightsError(
                f"no place for tensor '{name}' {tuple(tensor.shape)}",
                where=source.where,
                why=f"its companions of {kind.name} are not there",
            )
        account.lines.append(used.get(name) or Line(said[name], tuple(tensor.shape), "left out", None, why or ""))
    return state, account


def _check(state: Mapping[str, Tensor], config: ModelConfig, account: Account, where: str) -> Network:
    """Every parameter of ours got its tensor, of the right shape. Gives the network without numbers."""
    with torch.device("meta"):
        empty = network(config)
    own = empty.state_dict()
    missing = [name for name in own if name not in state]
    left = [name for name in state if name not in own]
    wrong = [
        f"{name} is {tuple(state[name].shape)}, not {tuple(own[name].shape)}"
        for name in own
        if name in state and state[name].shape != own[name].shape
    ]
    if missing or left or wrong:
        told = [f"{n} is missing" for n in missing] + [f"{n} has no place" for n in left] + wrong
        more = f" and {len(told) - 3} more" if len(told) > 3 else ""
        why = "; ".join(told[:3]) + more
        raise WeightsError(f"the tensors of {account.format} do not make a whole network", where=where, why=why)
    return empty


def fit(loaded: Loaded, *, scheme: str | None = None, new_head: bool = False, **changes: Any) -> Loaded:
    """The same weights for another image size, patch, channels or classes, with the account of what that took."""
    wanted = {name: value for name, value in changes.items() if value is not None}
    weights = loaded.weights
    scheme = scheme or (FORMATS[loaded.format].scheme if loaded.format in FORMATS else "bilinear-corners")
    if scheme not in SCHEMES:
        raise unknown("scheme of resizing", scheme, SCHEMES)
    if not wanted and not new_head:
        return loaded
    account = copy.deepcopy(loaded.account)
    state, config, resized, fresh = adapt(weights.state, weights.config, wanted, scheme=scheme, new_head=new_head)
    account.lines = [
        dataclasses.replace(line, fate="resized", note=resized[line.ours])
        if line.ours in resized
        else dataclasses.replace(line, fate="left out", ours=None, note="the head of other classes")
        if line.ours and (line.ours in fresh or line.ours not in state)
        else line
        for line in account.lines
    ]
    account.fresh |= fresh
    classes = labels.default(config.classes) if new_head else weights.classes
    prepared = _prepared(weights.preprocessing, config)
    if prepared.image_size != weights.preprocessing.image_size:
        account.notes.append(f"pictures prepared at {'×'.join(map(str, prepared.image_size))} instead")
    fitted = Weights(config, state, prepared, classes, weights.trained)
    return dataclasses.replace(loaded, weights=fitted, account=account, empty=[])


def _prepared(preprocessing: Preprocessing, config: ModelConfig) -> Preprocessing:
    """The same preparation of pictures at the network's size and channels."""
    sized = preprocessing.at(config.image)
    if sized.channels == config.channels:
        return sized
    mean, std = (sum(values) / len(values) for values in (sized.mean, sized.std))
    return dataclasses.replace(
        sized, channels=config.channels, mean=(mean,) * config.channels, std=(std,) * config.channels
    )


def _told(preprocessing: Preprocessing) -> str:
    height, width = preprocessing.image_size
    mean, std = (", ".join(f"{value:g}" for value in values) for values in (preprocessing.mean, preprocessing.std))
    return f"{height}×{width}, {preprocessing.resize}, mean {mean}, std {std}"
