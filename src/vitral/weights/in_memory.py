"""Read a network in memory, whose module states what a file of its tensors does not.

Classes of timm, torchvision and transformers are recognized by their path and never imported. The world is closed: an
unlisted class, a hook, a replaced method or a special type of parameter is refused, because the arithmetic may no
longer be that of the class. The module is not changed: its mode, hooks, device and tensors stay as they are.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from vitral import kernels
from vitral.errors import UsageError, WeightsError, type_of
from vitral.model import Foreign
from vitral.model.edited import edited
from vitral.model.watched import foreign_hooks
from vitral.weights import class_names
from vitral.weights.architectures.timm_module import UnreadableError, fields, name_of, scheme
from vitral.weights.formats import FORMATS
from vitral.weights.formats.huggingface_config import ARCHITECTURES
from vitral.weights.notes import Caution
from vitral.weights.read.source import Source, Stated

GRADIENTS = (
    "vitral.train(data, model=module) trains any network; "
    "vitral.explain(module, images, method='input-gradient') explains it"
)


def source_of(module: nn.Module) -> Source:
    """Read tensors and stated properties of a network of timm, torchvision or transformers.

    Tensors on the CPU are the module's own, not copies. Raises `WeightsError` with the reason for a module that vitral
    cannot compute, `UsageError` for one without values.
    """
    module = unwrapped(module)
    where = described(module)
    with refusing(module):
        read = _reader(module)
        _check_unmodified(module)
        config, stated = read(module)
    tensors = {name: tensor.cpu() for name, tensor in module.state_dict().items()}
    return Source(where, tensors, {}, config, None, (), stated)


@contextmanager
def refusing(module: nn.Module) -> Iterator[None]:
    """Raise `WeightsError` with the reason of an `UnreadableError`, and `UsageError` for a module without values."""
    where = described(module)
    if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        raise UsageError("this network has no values", where=where, why="its tensors are on the meta device")
    try:
        yield
    except (UnreadableError, AttributeError) as reason:  # a part of an unexpected class has other attributes
        what = "vitral cannot compute this network"
        raise WeightsError(what, where=where, why=str(reason), hint=GRADIENTS) from None


def unwrapped(module: nn.Module) -> nn.Module:
    """Remove the wrappers of `torch.compile`, parallel training and averaged weights."""
    while (inner := _WRAPPERS.get(name_of(module))) is not None:
        module = getattr(module, inner)
    return module


_WRAPPERS = {
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch.optim.swa_utils.AveragedModel": "module",
    "timm.utils.model_ema.ModelEmaV3": "module",
}


def described(module: nn.Module) -> str:
    """Name a module for errors and reports: "timm VisionTransformer in memory"."""
    library = _library(type(module))
    prefix = f"{library} " if library in ("timm", "torchvision", "transformers", "vitral") else ""
    return f"{prefix}{type(module).__name__} in memory"


def _library(kind: type) -> str:
    return kind.__module__.partition(".")[0]


_Reader = Callable[[Any], tuple[Mapping[str, Any] | None, Stated]]
"""Returns a substitute for `config.json`, and the properties stated by the module."""


def _reader(module: nn.Module) -> _Reader:
    name = name_of(module)
    if name in _READERS:
        return _READERS[name]
    parent = next(
        (
            f"{one.__module__}.{one.__qualname__}"
            for one in type(module).__mro__[1:]
            if f"{one.__module__}.{one.__qualname__}" in _READERS
        ),
        None,
    )
    if parent:
        raise UnreadableError(f"{name} is a subclass of {parent.rpartition('.')[2]}, and may compute something else")
    raise UnreadableError(f"{name} is not a Vision Transformer of timm, torchvision or transformers known to vitral")


# ---------------------------------------------------------------- modified modules


def modification(network: nn.Module) -> str:
    """Describe the first hook, replaced method, subclass, backend or parametrization in a network of vitral: kernels
    that take its weights would compute something else. Empty if there is none.
    """
    for name, part in network.named_modules():
        if not isinstance(network, Foreign) and _library(type(part)) not in ("vitral", "torch"):
            return f"'{name}' is {type_of(part)} of {type(part).__module__}"
        if isinstance(own := vars(part).get("backend"), types.FunctionType) and own not in _KNOWN_BACKENDS:
            return f"the backend of '{name}' was replaced"
        if is_parametrized(part):
            return f"'{name}' is parametrized"
    try:
        _check_unmodified(network, ignored=("backend",))
    except UnreadableError as reason:
        return str(reason)
    return ""


def replaced_product(attention: nn.Module, *, any_backend: bool = False) -> str:
    """Describe how the product of an attention was replaced: it is then not softmax(q kᵀ) v. Empty if it was not, or by
    `any_backend` alone.
    """
    kind, own = type(attention), vars(attention).get("backend")
    if found := edited("Attention", "AttentionPool"):
        return found
    if _library(kind) != "vitral":
        return f"it is a {kind.__name__} of {kind.__module__}"
    if isinstance(own, types.FunctionType) and own not in _KNOWN_BACKENDS and not any_backend:
        return "its backend was replaced"
    return next((f"its '{name}' was replaced" for name in _replaced(attention) if name != "backend"), "")


_KNOWN_BACKENDS = (*kernels.REFERENCE, *kernels.REFERENCE.values())


def _check_unmodified(module: nn.Module, ignored: Collection[str] = ()) -> None:
    """Refuse hooks, replaced methods, and parameters that are not plain tensors."""
    for name, part in module.named_modules():
        shown = f"'{name}'" if name else "the module"
        if foreign_hooks(part):
            raise UnreadableError(f"{shown} has a hook, which may change what it computes")
        if replaced := next((one for one in _replaced(part) if one not in ignored), None):
            raise UnreadableError(f"'{replaced}' of {shown} was replaced")
        for inner, tensor in (*part._parameters.items(), *part._buffers.items()):
            if tensor is not None and (type(tensor) not in (nn.Parameter, nn.Buffer, Tensor) or tensor.is_quantized):
                raise UnreadableError(f"'{inner}' of {shown} is {type_of(tensor)}")


def _replaced(part: nn.Module) -> Iterator[str]:
    """List methods of the class that an instance or another library replaced."""
    for name in vars(part):
        if isinstance(getattr(type(part), name, None), types.FunctionType):
            yield name
    for name, function in vars(type(part)).items() if _library(type(part)) == "vitral" else ():
        if isinstance(function, types.FunctionType) and function.__module__ != type(part).__module__:
            yield name
    home = getattr(type(part).forward, "__module__", "") or ""
    if home.partition(".")[0] not in (_library(type(part)), "torch"):
        yield "forward"


def _check_patches(module: nn.Module) -> None:
    """Refuse patches that overlap or have gaps."""
    for name, part in module.named_modules():
        if isinstance(part, nn.Conv2d) and "backbone" not in name and "decoder" not in name:
            whole = (part.dilation, part.groups, part.padding_mode) == ((1, 1), 1, "zeros")
            if not whole or part.stride != part.kernel_size or part.padding not in ((0, 0), "valid"):
                raise UnreadableError(f"the patches of '{name}' overlap or have gaps")


def _only(values: set[Any], what: str) -> Any:
    """Return the value shared by all parts, None if there is none; `UnreadableError` if they differ."""
    if len(values) > 1:
        raise UnreadableError(f"its {what} differ: {', '.join(sorted(map(str, values)))}")
    return next(iter(values), None)


_TORCH = "torch.nn.modules"

# ---------------------------------------------------------------- timm


def _timm(module: Any) -> tuple[Mapping[str, object] | None, Stated]:
    for name, part in module.named_modules():
        if type(part).__name__ in _TIMM_ACTIVATIONS and not name.endswith(".act") and "backbone" not in name:
            raise UnreadableError(f"'{name}' is {type_of(part)}")
    found = fields(module)
    _check_patches(module)
    names = list(module.state_dict())
    fitting = [one for one in _TIMM_FORMATS if not FORMATS[one].unexpected(_spelled(one, names))]
    fitting = [one for one in fitting if not FORMATS[one].missing(_spelled(one, names))]
    if not fitting:
        raise UnreadableError("its tensors have names of no timm format")
    cfg = getattr(module, "pretrained_cfg", None)
    if cfg is not None and not isinstance(cfg, Mapping):
        cfg = cfg.to_dict()
    origin = (
        "the module's pretrained_cfg" if cfg else Caution("assumed: AugReg's default (the module does not state it)")
    )
    return {"pretrained_cfg": cfg} if cfg else {}, Stated(found, origin, fitting[0], scheme(module))


def _timm_bit(module: Any) -> tuple[Mapping[str, object] | None, Stated]:
    """Read a BiT. Its class has options for many other ResNets, which are refused."""
    for name, part in module.named_modules():
        if name_of(part) not in _BIT:
            raise UnreadableError(f"'{name}' is {type_of(part)}")
        if not _BIT[name_of(part)](part):
            raise UnreadableError(f"'{name}' has other parameters than BiT's")
    first = (module.stem.conv.kernel_size, module.stem.conv.stride, module.stem.pool.kernel_size)
    strides = [[block.conv2.stride[0] for block in stage.blocks] for stage in module.stages]
    usual = [[1 if not number or inner else 2 for inner in range(len(one))] for number, one in enumerate(strides)]
    pooled = module.head.global_pool.pool_type
    if first != ((7, 7), (2, 2), 3) or [*module.stem._modules] != ["conv", "pad", "pool"] or strides != usual:
        raise UnreadableError("its convolutions have other strides than BiT's")
    if pooled != "avg":
        raise UnreadableError(f"its features are pooled by '{pooled}'")
    cfg = dict(module.pretrained_cfg) if getattr(module, "pretrained_cfg", None) else None
    assumed = Caution("assumed: the authors' default, because the module does not state it")
    origin = "the module's pretrained_cfg" if cfg else assumed
    return {"pretrained_cfg": cfg} if cfg else {}, Stated({}, origin, "timm-bit")


def _as_usual(part: Any) -> bool:
    """True for a convolution that keeps the size of its input, except for its stride."""
    padding = tuple((side - 1) // 2 for side in part.kernel_size)
    return bool((part.padding, part.dilation, part.groups) == (padding, (1, 1), 1) and part.eps == 1e-8)


_BIT: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(
        (
            "timm.models.resnetv2.ResNetV2",
            "timm.models.resnetv2.ResNetStage",
            "timm.models.resnetv2.PreActBottleneck",
            "timm.models.resnetv2.DownsampleConv",
            "timm.layers.classifier.ClassifierHead",
            "timm.layers.adaptive_avgmax_pool.SelectAdaptivePool2d",
            "timm.layers.drop.DropPath",
            f"{_TORCH}.container.Sequential",
            f"{_TORCH}.linear.Identity",
            f"{_TORCH}.activation.ReLU",
            f"{_TORCH}.conv.Conv2d",
            f"{_TORCH}.dropout.Dropout",
            f"{_TORCH}.flatten.Flatten",
            f"{_TORCH}.pooling.AdaptiveAvgPool2d",
        ),
        lambda part: True,
    ),
    "timm.layers.std_conv.StdConv2d": _as_usual,
    "timm.layers.norm_act.GroupNormAct": lambda part: (
        (part.num_groups, part.eps) == (32, 1e-5) and type(part.act) is nn.ReLU and type(part.drop) is nn.Identity
    ),
    f"{_TORCH}.padding.ConstantPad2d": lambda part: (part.padding, part.value) == ((1, 1, 1, 1), 0.0),
    f"{_TORCH}.pooling.MaxPool2d": lambda part: (part.stride, part.padding, part.dilation) == (2, 0, 1),
}
"""Class in a BiT → predicate, True for a part with BiT's parameters."""
_TIMM_ACTIVATIONS = ("GELU", "GELUTanh", "QuickGELU", "ReLU", "SiLU")
_TIMM_FORMATS = ("timm", "timm-eva", "timm-naflex")


def _spelled(kind: str, names: list[str]) -> list[str]:
    return list(FORMATS[kind].canonical({name: torch.empty(0) for name in names}))


# ---------------------------------------------------------------- torchvision

_TV = "torchvision.models.vision_transformer"
_ACTIVATIONS: Mapping[str, Callable[[Any], str | None]] = {
    f"{_TORCH}.activation.GELU": lambda act: "gelu" if act.approximate == "none" else "gelu-tanh",
    f"{_TORCH}.activation.ReLU": lambda act: "relu",
    f"{_TORCH}.activation.SiLU": lambda act: "silu",
    "transformers.activations.GELUActivation": lambda act: "gelu",
    "transformers.activations.GELUTanh": lambda act: "gelu-tanh",
    "transformers.activations.PytorchGELUTanh": lambda act: "gelu-tanh",
    "transformers.activations.NewGELUActivation": lambda act: "gelu-tanh",
    "transformers.activations.FastGELUActivation": lambda act: "gelu-tanh",
    "transformers.activations.AccurateGELUActivation": lambda act: "gelu-tanh",
    "transformers.activations.QuickGELUActivation": lambda act: "quick-gelu",
    "transformers.activations.SiLUActivation": lambda act: "silu",
}
_PLAIN = {
    f"{_TORCH}.{one}"
    for one in (
        "container.Sequential",
        "container.ModuleList",
        "linear.Linear",
        "linear.Identity",
        "conv.Conv2d",
        "linear.NonDynamicallyQuantizableLinear",
        "normalization.LayerNorm",
        "dropout.Dropout",
        "sparse.Embedding",
        "activation.MultiheadAttention",
        "pixelshuffle.PixelShuffle",
    )
}


def _torchvision(module: Any) -> tuple[Mapping[str, object] | None, Stated]:
    known = {*_PLAIN, *(f"{_TV}.{one}" for one in ("VisionTransformer", "Encoder", "EncoderBlock", "MLPBlock"))}
    acts, heads = set[str | None](), set[int]()
    for block in module.encoder.layers:
        parts = [name_of(part) for part in block.mlp]
        if len(parts) != 5 or parts[1] not in _ACTIVATIONS:
            raise UnreadableError("the MLP of its blocks has other parts")
        acts.add(_ACTIVATIONS[parts[1]](block.mlp[1]))
        heads.add(_heads(block.self_attention))
    for name, part in module.named_modules():
        places = {_TANH: "heads.act", **dict.fromkeys(_ACTIVATIONS, ".mlp.1")}
        if name_of(part) not in known and not name.endswith(places.get(name_of(part), name + "?")):
            raise UnreadableError(f"'{name}' is {type_of(part)}")
    inner = [(name, type(part)) for name, part in module.heads.named_children()]
    if inner not in (
        [("head", nn.Linear)],
        [("pre_logits", nn.Linear), ("act", nn.Tanh), ("head", nn.Linear)],
    ):
        raise UnreadableError(f"its heads are {', '.join(f'{name} ({kind.__name__})' for name, kind in inner)}")
    _check_patches(module)
    facts = {
        "heads": _only(heads, "numbers of heads"),
        "norm_eps": _epsilon(module),
        "activation": _only(acts, "activations"),
        "image_size": (module.image_size, module.image_size),
        "pool": "cls",
        "cls_position": True,
    }
    origin = Caution("assumed: torchvision's usual transforms, because the module does not state them")
    return None, Stated(facts, origin, "torchvision")


def _heads(attention: Any) -> int:
    usual = (attention.batch_first, attention._qkv_same_embed_dim, attention.add_zero_attn, attention.bias_k)
    if usual != (True, True, False, None):
        raise UnreadableError("its attention has options that vitral's does not support")
    return int(attention.num_heads)


def _epsilon(module: nn.Module, unread: tuple[str, ...] = ()) -> float:
    norms = {
        part.eps
        for name, part in module.named_modules()
        if isinstance(part, nn.LayerNorm) and not name.startswith(unread)
    }
    return float(_only(norms, "epsilons"))


# ---------------------------------------------------------------- transformers

_UNREAD = ("decoder.", "text_model.")
_ATTENTIONS = {None, "eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4"}


def _transformers(module: Any) -> tuple[Mapping[str, object] | None, Stated]:
    home = type(module).__module__
    heads, acts = set[int](), set[str | None]()
    for name, part in module.named_modules():
        kind = name_of(part)
        if name.startswith(_UNREAD):
            continue
        is_pooler = name.endswith("pooler.activation")
        if kind in _ACTIVATIONS and name.endswith(("activation_fn", "act_fn")):
            acts.add(_ACTIVATIONS[kind](part))
        elif not (kind == _TANH if is_pooler else kind in _PLAIN or type(part).__module__ == home):
            raise UnreadableError(f"'{name}' is {type_of(part)}")
        if (count := getattr(part, "num_attention_heads", getattr(part, "num_heads", None))) is not None:
            heads.add(_heads(part) if isinstance(part, nn.MultiheadAttention) else count)
            _check_scale(part, count)
        if (frequencies := getattr(part, "inv_freq", None)) is not None and not _usual_frequencies(part, frequencies):
            raise UnreadableError(f"'{name}' has other rotary frequencies")
    _check_patches(module)
    config = {**module.config.to_dict(), "architectures": [type(module).__name__]}
    if module.config._attn_implementation not in _ATTENTIONS:
        raise UnreadableError(f"its attention is computed by '{module.config._attn_implementation}'")
    gated = any(".gate_proj." in name or ".weights_in." in name for name, _ in module.named_parameters())
    act = _only(acts, "activations")
    if gated and act not in (None, "silu"):
        raise UnreadableError(f"its gated MLP has {act}, not silu")
    for one in (config, config.get("vision_config") or {}):
        if not gated:
            one.pop("hidden_act", None)  # the module states it
    facts = {"heads": _only(heads, "numbers of heads"), "norm_eps": _epsilon(module, _UNREAD)}
    facts |= {} if gated else {"activation": act}
    origin = Caution(f"assumed: transformers' default for {config.get('model_type')}; not stated by the module")
    return config, Stated(facts, origin)


_TANH = f"{_TORCH}.activation.Tanh"


def _usual_frequencies(rope: Any, frequencies: Tensor) -> bool:
    usual = rope.base ** -torch.arange(0, 1, 4 / rope.head_dim)
    return torch.allclose(frequencies.float().cpu(), usual, rtol=0.01)  # half precision rounds them


def _check_scale(attention: object, heads: int) -> None:
    scale, head = getattr(attention, "scaling", getattr(attention, "scale", None)), getattr(attention, "head_dim", None)
    if scale is not None and head and abs(scale - head**-0.5) > 1e-9:
        raise UnreadableError("its attention scale is not 1 / √(head width)")


_READERS: Mapping[str, _Reader] = {
    **{
        f"timm.models.{one}": _timm
        for one in (
            "vision_transformer.VisionTransformer",
            "deit.VisionTransformerDistilled",
            "eva.Eva",
            "naflexvit.NaFlexVit",
            "beit.Beit",
        )
    },
    "timm.models.resnetv2.ResNetV2": _timm_bit,
    f"{_TV}.VisionTransformer": _torchvision,
    **{
        f"transformers.models.{folder}.modeling_{folder}.{one}": _transformers
        for kind, models in ARCHITECTURES.items()
        for folder in [kind.removesuffix("_vision_model")]
        for one in models
    },
}
"""Module path and name of a class → its reader."""


def names_of(module: nn.Module, count: int) -> tuple[str, ...]:
    """Read the class names of any module of transformers or timm; numbers if it has none."""
    config = getattr(module, "config", None)
    cfg = getattr(module, "pretrained_cfg", None)
    plain = config.to_dict() if config is not None and hasattr(config, "to_dict") else {"pretrained_cfg": cfg}
    try:
        names = class_names.from_config(plain)
    except WeightsError:
        names = None
    return names if names and len(names) == count else tuple(map(str, range(count)))
