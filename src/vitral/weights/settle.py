"""Decide what tensors do not determine: stated by a config, known from a published architecture, or refused.

What a file states is honored or refused. If it states nothing, the tensors' names and widths are looked up among
published architectures. A single match is taken. Of several, or of none in timm's layout, the plain ViT or DeiT of that
size is taken and the others are listed. Otherwise the load is refused, with the candidates and the flag that selects
one. A choice made this way is reported as an assumption.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from vitral.errors import UsageError, WeightsError
from vitral.model import ModelConfig, ViTConfig
from vitral.weights.architectures import Architecture, named, signature, with_signature
from vitral.weights.formats.format import HEADS, Format
from vitral.weights.read.source import Source
from vitral.weights.report import Assumption
from vitral.weights.transform.infer import infer
from vitral.weights.transform.keymap import ConfigFields

Size = int | tuple[int, int] | None


@dataclass(frozen=True)
class Settled:
    """The configuration of the network, and the reasons for it."""

    config: ModelConfig
    architecture: Architecture | None = None
    """The architecture whose preprocessing and scheme of resizing may be used."""
    assumed: Assumption | None = None
    given: tuple[str, ...] = ()
    """Notes on properties stated by the user alone."""


def settle(
    kind: Format, source: Source, state: Mapping[str, Tensor], image_size: Size, heads: int | None, like: str | None
) -> Settled:
    """Decide the configuration of the network whose tensors, under vitral's names, are `state`.

    `heads` and `like` are stated by the user. Raises `WeightsError` if it cannot be decided or computed, and if the
    user contradicts a file.
    """
    facts = {**kind.facts(source), **(source.stated.fields if source.stated else {})}
    _check_given(kind, source, facts, heads, like)
    notes: tuple[str, ...] = ()
    if heads and facts.get("heads") is None:
        facts, notes = facts | {"heads": heads}, (f"heads {heads}, given",)
    if kind.config:
        return Settled(kind.config(state, facts, source.where))
    if source.stated is not None:
        return Settled(infer(facts, state, source.where, image_size))
    if like is not None:
        chosen = _named(like, source, facts, heads)
        notes += () if kind.stated(source) else (f"as timm:{chosen.name}, given",)
        return Settled(infer(chosen.fields | facts, state, source.where, image_size), chosen, given=notes)
    if kind.stated(source):
        config = infer(_with_heads(kind.heads, facts, state), state, source.where, image_size)
        architecture = named(str((source.config or {})["architecture"]), source.where) if kind.architectures else None
        return Settled(config, architecture, given=notes)
    fitting = _fitting(with_signature(_shapes(source)), facts, state, source, image_size)
    choose = _published if kind.architectures else _released
    return Settled(*choose(kind, fitting, facts, state, source, image_size), notes)


def check_own(config: ModelConfig, where: object, format: str | None, heads: int | None, like: str | None) -> None:
    """Raise `WeightsError` for options that contradict vitral's own weights, which state their whole network."""
    if format not in (None, "native"):
        what = f"these weights do not have format '{format}'"
        raise WeightsError(what, where=where, why="they are vitral's own", hint=_leave("format"))
    if like is not None:
        what = f"these are not weights of '{like.removeprefix('timm:')[:60]}'"
        why = "they are vitral's own and state their network"
        raise WeightsError(what, where=where, why=why, hint=_leave("like"))
    known = getattr(config, "heads", None)
    if heads not in (None, known):
        raise _other_heads(heads, known, "they are vitral's own and state it", where)


def _check_given(kind: Format, source: Source, facts: ConfigFields, heads: int | None, like: str | None) -> None:
    """Refuse options that contradict a file, or that cannot apply."""
    if heads is not None and heads < 1:
        raise UsageError(f"--heads must be at least 1, not {heads}", where=source.where, hint="--heads 12")
    where, stated = source.where, kind.stated(source)
    network_fields = _STATING.intersection(source.config or {})
    if network_fields and not stated and kind.config is None and source.stated is None:
        name = min(network_fields)
        why = f"config.json beside the weights states '{name}', which format '{kind.name}' does not use"
        hint = "leave out --from, or remove config.json if it belongs to other weights"
        raise WeightsError("cannot honor the configuration", where=where, why=why, hint=hint)
    if like is not None and (kind.config or (stated and not kind.architectures)):
        why = f"they have format '{kind.name}'" + ", and config.json beside them states the network" * stated
        raise WeightsError("these weights have no architecture of timm", where=where, why=why, hint=_leave("like"))
    known = facts.get("heads")
    if heads is not None and (kind.config or known not in (None, heads)):
        by = "stated by config.json beside the weights" if stated else "determined by their tensors"
        raise _other_heads(heads, known, by, where)


_STATING = frozenset(("architecture", "model_type", "num_attention_heads"))
"""Fields of config.json that state a network."""


def _other_heads(heads: int | None, known: int | None, by: str, where: object) -> WeightsError:
    what = f"these weights have {known or 'no'} heads, not {heads}"
    why = by if known else "a ResNet has none, and networks that read text state theirs"
    return WeightsError(what, where=where, why=why, hint=_leave("heads"))


def _leave(name: str) -> str:
    flag = "from" if name == "format" else name
    return f"leave out --{flag}, or {name} in Python"


def _named(like: str, source: Source, facts: ConfigFields, heads: int | None) -> Architecture:
    """Find the architecture named by the user; its sizes may differ only if the heads are stated too."""
    found, stated = named(like, source.where), (source.config or {}).get("architecture")
    what = f"these are not weights of '{found.name}'"
    if stated is not None and str(stated).removeprefix("timm:").partition(".")[0] != found.name:
        why = f"config.json beside the weights states '{str(stated)[:60]}'"
        raise WeightsError(what, where=source.where, why=why)
    if signature(_shapes(source)) == found.signature:
        if stated is None and heads not in (None, found.fields["heads"]):
            raise _other_heads(heads, found.fields["heads"], f"as many as '{found.name}'", source.where)
    elif heads is None:
        why = "the tensors have other names or widths"
        raise WeightsError(
            what, where=source.where, why=why, hint=f"{_command(source.where)} --like timm:NAME --heads N"
        )
    other = [name for name in found.fields if name != "heads" and facts.get(name) not in (None, found.fields[name])]
    if stated is None and other:
        why = f"{other[0]} is {facts[other[0]]} in these weights, and {found.fields[other[0]]} there"
        raise WeightsError(what, where=source.where, why=why, hint=_leave("like"))
    return found


def _shapes(source: Source) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in source.tensors.items()}


def _published(
    kind: Format,
    fitting: list[Architecture],
    facts: ConfigFields,
    state: Mapping[str, Tensor],
    source: Source,
    image_size: Size,
) -> tuple[ModelConfig, Architecture | None, Assumption | None]:
    """Settle a bare file with timm's names."""
    groups: dict[str, list[Architecture]] = {}
    for one in fitting:
        groups.setdefault(one.refused or json.dumps([one.fields, one.scheme], sort_keys=True), []).append(one)
    chosen = [group for group in groups.values() if any(one.plain for one in group)] or list(groups.values())
    if not fitting:
        known = HEADS if "cls_token" in state and "pos_embed" in state else {}
        config = infer(_with_heads(known, facts, state), state, source.where, image_size)
        if config.norm_pre or config.attn_norm or config.mlp_norm or kind.name != "timm":
            why = "it is not a plain ViT, and no published architecture has these tensors"
            hint = f"{_command(source.where)} --like timm:NAME --heads N"
            raise WeightsError("cannot determine the arithmetic", where=source.where, why=why, hint=hint)
        plain = "a plain ViT: no published architecture has these tensors"
        return config, None, Assumption(_unproven(config, facts), plain)
    if len(chosen) > 1:
        names = [group[0].name for group in chosen]
        what = "these tensors fit networks of different arithmetic, and no file states which"
        hint = f"{_command(source.where)} --like timm:{names[0]}, or like='timm:{names[0]}' in Python"
        raise WeightsError(what, where=source.where, why=f"candidates: {', '.join(names)}", hint=hint)
    first = next((one for one in chosen[0] if one.plain), chosen[0][0])
    if first.refused:
        raise WeightsError(f"vitral's networks cannot compute '{first.name}'", where=source.where, why=first.refused)
    config = infer(first.fields | facts, state, source.where, image_size)
    others = tuple(one.name for group in groups.values() if group is not chosen[0] for one in group)
    more = f" and {len(chosen[0]) - 1} more" if len(chosen[0]) > 1 else ""
    alike = all(one.preprocessing == first.preprocessing for one in chosen[0]) and not others
    assumed = Assumption(_unproven(config, facts), f"timm:{first.name}{more}", others)
    return config, first if alike else None, assumed


def _released(
    kind: Format,
    fitting: list[Architecture],
    facts: ConfigFields,
    state: Mapping[str, Tensor],
    source: Source,
    image_size: Size,
) -> tuple[ModelConfig, Architecture | None, Assumption | None]:
    """Settle a bare file of another family, whose published networks have one arithmetic and known sizes."""
    if kind.undecided:
        hint = "put the config.json of its repository beside the file"
        raise WeightsError("cannot determine the arithmetic", where=source.where, why=kind.undecided, hint=hint)
    config = infer(_with_heads(kind.heads, facts, state), state, source.where, image_size)
    fields = _unproven(config, {"heads": facts.get("heads")})
    return config, None, Assumption(fields, f"{kind.name}'s published networks", tuple(one.name for one in fitting))


def _with_heads(table: Mapping[tuple[int, int], int], facts: ConfigFields, state: Mapping[str, Tensor]) -> ConfigFields:
    """Add the heads of the published network of this width and MLP width, if there is one."""
    kernel, narrow = state.get("patch_embed.proj.weight"), state.get("blocks.0.mlp.fc2.weight")
    if facts.get("heads") is not None or kernel is None or narrow is None or narrow.ndim != 2:
        return facts
    heads = table.get((kernel.shape[0], narrow.shape[1]))
    return facts if heads is None else {**facts, "heads": heads}


def _fitting(
    candidates: Sequence[Architecture],
    facts: ConfigFields,
    state: Mapping[str, Tensor],
    source: Source,
    image_size: Size,
) -> list[Architecture]:
    """Filter the candidates that these tensors complete; refused ones stay, because nothing is known of them."""
    found, errors = [], []
    for one in candidates:
        try:
            if not one.refused:
                infer(one.fields | facts, state, source.where, image_size)
            found.append(one)
        except (WeightsError, UsageError) as error:
            errors.append(error)
    if errors and not any(not one.refused for one in found):
        raise errors[0]
    return found


def _command(where: object) -> str:
    """Command that converts these weights to a file with a full configuration."""
    return f"vitral convert {shlex.quote(str(where))} weights/own"


def _unproven(config: ViTConfig, stated: ConfigFields) -> dict[str, object]:
    """List fields that neither tensors nor statements prove, with their values."""
    found: dict[str, object] = {
        "heads": config.heads,
        "activation": config.activation,
        "norm_eps": config.norm_eps,
        "norm": config.norm,
        "rotary": "DINOv3" if config.position == "rotary" else config.rope.to_json() if config.rope else None,
        "pool": config.pool,
    }
    if config.cls_token and config.position == "learned":
        found["cls_position"] = config.cls_position
    if config.registers:
        found["prefix"] = [*["class token"] * config.cls_token, "registers"]
    proven = {"heads"} if config.qk_norm else set()
    proven |= {"activation"} if config.activation == "swiglu" else set()
    return {name: value for name, value in found.items() if name not in proven and stated.get(name) is None}
