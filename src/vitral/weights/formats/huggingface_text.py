"""TrOCR in Hugging Face's layout: `VisionEncoderDecoderModel` of a ViT or DeiT and a TrOCR decoder (arXiv 2109.10282).

`transformers/models/trocr/modeling_trocr.py` and `models/vision_encoder_decoder/` are the reference for arithmetic and
names. Start, end and padding are those of `generation_config.json`, else of `config.json`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from vitral.data.images.preprocessing import Preprocessing
from vitral.errors import UsageError, WeightsError
from vitral.model import DecoderConfig, EncoderDecoderConfig
from vitral.weights.formats.format import Format
from vitral.weights.formats.huggingface import (
    ACTIVATIONS,
    AS_REGISTER,
    EMBEDDINGS,
    POSITIONS,
    VIT_BLOCKS,
    facts_of,
)
from vitral.weights.formats.huggingface_config import EVERY, Only, Use, check_fields, whole, wrong
from vitral.weights.notes import Caution
from vitral.weights.preprocessing_configs import DEFAULTS, from_huggingface
from vitral.weights.read.source import Source
from vitral.weights.transform.infer import infer
from vitral.weights.transform.keymap import PAIR, STACKED, ConfigFields, Form, Rule, both, same

FIELDS: dict[str, Use] = {
    **dict.fromkeys(
        (
            "vocab_size",
            "d_model",
            "decoder_layers",
            "decoder_attention_heads",
            "decoder_ffn_dim",
            "activation_function",
            "max_position_embeddings",
            "decoder_start_token_id",
            "scale_embedding",
            "use_learned_position_embeddings",
            "layernorm_embedding",
            "pad_token_id",
            "eos_token_id",
            "cross_attention_hidden_size",
            "tie_word_embeddings",
        ),
        "honored",
    ),
    **dict.fromkeys(
        (
            "dropout",
            "attention_dropout",
            "activation_dropout",
            "init_std",
            "decoder_layerdrop",
            "use_cache",
            "bos_token_id",
            "is_decoder",
            "add_cross_attention",
            "is_encoder_decoder",
        ),
        "no effect",
    ),
}
"""Field of the decoder's configuration → its use, in addition to `EVERY`."""

_LAYER = "decoder.model.decoder.layers.{i}"
_OFFSET = 2  # rows of the table of positions before the first position, which nothing reads
_TABLE = Form(
    "without two rows that nothing reads",
    lambda tensors: tensors[0][_OFFSET:][None],
    lambda parameter, heads: [torch.cat([parameter.new_zeros(_OFFSET, parameter.shape[2]), parameter[0]])],
)


def _block() -> tuple[Rule, ...]:
    block = "decoder.blocks.{i}"
    return (
        *both(f"{block}.attn.qkv", [f"{_LAYER}.self_attn.{name}_proj" for name in "qkv"], STACKED),
        *both(f"{block}.cross.kv", [f"{_LAYER}.encoder_attn.{name}_proj" for name in "kv"], PAIR),
        *same(
            {
                f"{block}.attn.proj.*": f"{_LAYER}.self_attn.out_proj.*",
                f"{block}.norm1.*": f"{_LAYER}.self_attn_layer_norm.*",
                f"{block}.cross.q.*": f"{_LAYER}.encoder_attn.q_proj.*",
                f"{block}.cross.proj.*": f"{_LAYER}.encoder_attn.out_proj.*",
                f"{block}.norm2.*": f"{_LAYER}.encoder_attn_layer_norm.*",
                f"{block}.mlp.fc1.*": f"{_LAYER}.fc1.*",
                f"{block}.mlp.fc2.*": f"{_LAYER}.fc2.*",
                f"{block}.norm3.*": f"{_LAYER}.final_layer_norm.*",
            }
        ),
    )


_DECODER = (
    *_block(),
    *same(
        {
            "decoder.token_embed.weight": "decoder.model.decoder.embed_tokens.weight",
            "decoder.norm_embed.*": "decoder.model.decoder.layernorm_embedding.*",
            "decoder.head.weight": "decoder.output_projection.weight",
            "project.*": "enc_to_dec_proj.*",
        }
    ),
    Rule("decoder.pos_embed", ("decoder.model.decoder.embed_positions.weight",), _TABLE),
)


def _of_encoder(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    return tuple(Rule(f"encoder.{r.parameter}", tuple(f"encoder.{n}" for n in r.tensors), r.form) for r in rules)


# ---------------------------------------------------------------- config.json


def _facts(encoder: str) -> Callable[[Source], ConfigFields]:
    """Fields of encoder (of type `encoder`) and decoder, from `config.json`."""
    of_encoder = facts_of(encoder, cls_position=True, pool="cls")

    def facts(source: Source) -> ConfigFields:
        config = source.config
        if config is None:
            why = "no config.json beside them states heads, norms and positions"
            raise WeightsError(
                "cannot determine the decoder", where=source.where, why=why, hint="pass the whole folder"
            )
        if config.get("model_type") != "vision-encoder-decoder":
            raise wrong("model_type", "'vision-encoder-decoder'", config.get("model_type"), source)
        inner = _part("encoder", encoder, source)
        tensors = {
            name.removeprefix("encoder."): tensor
            for name, tensor in source.tensors.items()
            if name.startswith("encoder.") and not name.startswith("encoder.pooler.")
        }
        fields = of_encoder(replace(source, config=inner, tensors=tensors))
        return {"encoder": fields, "decoder": _decoder(_part("decoder", "trocr", source), source)}

    return facts


def _part(name: str, kind: str, source: Source) -> Mapping[str, object]:
    part = (source.config or {}).get(name)
    if not isinstance(part, Mapping) or part.get("model_type") != kind:
        stated = part.get("model_type") if isinstance(part, Mapping) else part
        raise wrong(f"{name}.model_type", f"'{kind}'", stated, source)
    return part


def _decoder(config: Mapping[str, object], source: Source) -> ConfigFields:
    """Fields of `DecoderConfig`, with the defaults of transformers' class."""
    uses = {name: use for name, use in EVERY.items() if not name.startswith(("is_", "add_"))}
    check_fields({name: use.values for name, use in uses.items() if isinstance(use, Only)}, config, source)
    act = config.get("activation_function", "gelu")
    if not isinstance(act, str) or act not in ACTIVATIONS:
        raise wrong("activation_function", f"one of {', '.join(ACTIVATIONS)}", act, source)
    padding = _token("pad_token_id", config, source)
    learned = bool(config.get("use_learned_position_embeddings", True))
    wide = config.get("cross_attention_hidden_size")
    return {
        "vocabulary": whole(config, "vocab_size", 50265, source),
        "length": whole(config, "max_position_embeddings", 512, source),
        "start_token": _token("decoder_start_token_id", config, source),
        "end_token": _token("eos_token_id", config, source),
        "pad_token": padding,
        "dim": whole(config, "d_model", 1024, source),
        "depth": whole(config, "decoder_layers", 12, source),
        "heads": whole(config, "decoder_attention_heads", 16, source),
        "mlp_dim": whole(config, "decoder_ffn_dim", 4096, source),
        "memory_dim": None if wide is None else whole(config, "cross_attention_hidden_size", 1, source),
        "position": "learned" if learned else "sinusoidal",
        "first_position": 0 if learned else padding + 1,
        "scale_embedding": bool(config.get("scale_embedding", False)),
        "norm_embedding": bool(config.get("layernorm_embedding", True)),
        "activation": ACTIVATIONS[act],
        "tied_head": bool(config.get("tie_word_embeddings", True)),
    }


_TOKENS = {"decoder_start_token_id": 2, "eos_token_id": 2, "pad_token_id": 1}
"""Special tokens → defaults of the decoder's configuration class."""


def _token(name: str, config: Mapping[str, object], source: Source) -> int:
    """The number of a special token, as transformers' generation takes it."""
    places = (source.generation or {}, source.config or {}, config, _TOKENS)
    value = next((place[name] for place in places if place.get(name) is not None), None)
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if type(value) is not int or value < 0:
        raise wrong(name, "one token", value, source)
    return value


def _config(state: Mapping[str, Tensor], facts: ConfigFields, where: object) -> EncoderDecoderConfig:
    """Build the configuration from tensors under vitral's names; `WeightsError` if they do not fit it."""
    prefix = "encoder."
    inner = {name.removeprefix(prefix): t for name, t in state.items() if name.startswith(prefix)}
    encoder = infer(facts["encoder"], inner, where)
    fields = dict(facts["decoder"])
    head, table = state.get("decoder.head.weight"), state.get("decoder.token_embed.weight")
    if fields["tied_head"] and head is not None and (table is None or not torch.equal(head, table)):
        why = "'tie_word_embeddings' in config.json, but the head has other values than the tokens"
        raise WeightsError("cannot honor the configuration of the weights", where=where, why=why)
    fields["tied_head"] = head is None and fields["tied_head"]
    project = fields["memory_dim"] is None and encoder.dim != fields["dim"]
    try:
        decoder = DecoderConfig(**fields, norm="post", norm_eps=1e-5, final_norm=False, head_bias=False)
        return EncoderDecoderConfig(encoder, decoder, project)
    except UsageError as error:
        raise WeightsError(
            "config.json states an impossible decoder", where=where, why=error.why or error.what
        ) from None


def _preprocessing(default: str) -> Callable[[Source, EncoderDecoderConfig], tuple[Preprocessing, str]]:
    def of(source: Source, config: EncoderDecoderConfig) -> tuple[Preprocessing, str]:
        if source.preprocessor is not None:
            return from_huggingface(source.preprocessor, config.image), "preprocessor_config.json"
        return DEFAULTS[default](config.image), Caution("no preprocessor_config.json: the encoder's default")

    return of


_SEARCH = ("num_beams", "length_penalty", "early_stopping", "max_length", "max_new_tokens", "no_repeat_ngram_size")


def _assumed(source: Source) -> Sequence[str]:
    stated = [name for name in _SEARCH if (source.generation or {}).get(name) is not None]
    tokenizer = "the tokenizer is not read: its tokens have numbers as names"
    search = f"generation_config.json: {', '.join(stated)} are not read; state them when generating"
    return [search, tokenizer] if stated else [tokenizer]


def _format(name: str, encoder: str, rules: tuple[Rule, ...], required: str, default: str) -> Format:
    return Format(
        name=name,
        rules=(*_of_encoder((*EMBEDDINGS, *rules, *VIT_BLOCKS)), *_DECODER),
        required=(required, "decoder.model.decoder.embed_tokens.weight"),
        scheme="bicubic",
        preprocessing=_preprocessing(default),
        facts=_facts(encoder),
        assumed=_assumed,
        stated=lambda source: source.config is not None,
        config=_config,
        ignored={
            "encoder.pooler.*": "the decoder reads the tokens themselves",
            "*embed_positions._float_tensor": "computed",
        },
    )


TROCR = _format("hf-trocr", "vit", POSITIONS, "encoder.embeddings.position_embeddings", "huggingface-vit")
TROCR_DEIT = _format("hf-trocr-deit", "deit", AS_REGISTER, "encoder.embeddings.distillation_token", "deit")
FORMATS = {one.name: one for one in (TROCR, TROCR_DEIT)}
