"""Networks of other libraries, trained in the same loop: `timm:NAME`, `torchvision:NAME`, or `MODULE:FUNCTION`.
Installed packages add further libraries (`vitral.plugins`).

A weights file states the source of its network. timm and torchvision build theirs from a name, with random weights and
without a download. `MODULE:FUNCTION` is code of the user (`vitral.model.own`).
"""

from __future__ import annotations

import copy
import importlib
import inspect
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitral.errors import MissingExtraError, UsageError, VitralError, type_of, unknown
from vitral.model.config_base import ConfigBase, pair
from vitral.model.own import is_own, own_part
from vitral.plugins import Extensible


@dataclass(frozen=True)
class ForeignConfig(ConfigBase):
    """Source of a network, and the sizes it is built with. An integer image size is a square, in pixels."""

    source: str = ""
    image_size: int | tuple[int, int] = 224
    channels: int = 3
    classes: int = 1000
    version: str = ""
    """Version of the library that built it first, as "timm 1.0.31"; "" for a function, or if it is not known."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "image_size", pair(self.image_size))
        self.check_kinds()
        self._check_bounds()
        if not is_foreign(self.source):
            hint = "timm:NAME, torchvision:NAME or MODULE:FUNCTION"
            raise UsageError(f"'{self.source[:60]}' is not a network of another library", hint=hint)
        if min(*self.image, self.channels, self.classes) < 1:
            raise UsageError("sizes must be positive: image size, channels and classes")

    @property
    def image(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return self.image_size  # type: ignore[return-value]

    @property
    def dim(self) -> int:
        """Width, 0 for unknown: a CPU computes in fp32 unless bf16 is requested."""
        return 0

    @property
    def features(self) -> int:
        """Width of the input of the head, 0 for unknown."""
        return 0


class Foreign(nn.Module):
    """A network of another library: images (B, C, H, W) to logits (B, K). `body` is its module."""

    def __init__(self, config: ForeignConfig):
        super().__init__()
        self.config = config
        self.checkpointing = False  # of vitral's own networks; refused in the plan
        with torch.device("cpu"):  # a meta device would lose buffers that no weights file has
            self.body = _built(config)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, K); `UsageError` if the network fails on these images, or returns something else."""
        try:
            logits = self.body(images)
        except (VitralError, torch.OutOfMemoryError):
            raise
        except (RuntimeError, ValueError, TypeError, AssertionError) as error:
            if "memory" in str(error):  # the run reports it, with options that need less
                raise
            what = f"{self.config.source} cannot compute images of the shape {tuple(images.shape)}"
            where = _place_of(error, self.config.source.partition(":")[0])
            hint = "another --image-size, or another --model"
            raise UsageError(what, where=where, why=_reason(error), hint=hint) from error
        wanted = images.shape[0], self.config.classes  # `len(images)` would fix the batch of an export
        if not isinstance(logits, Tensor) or tuple(logits.shape) != wanted:
            got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            why = f"it returns {got}, not logits {wanted}"
            raise UsageError(f"{self.config.source} is not a classifier of these classes", why=why)
        return logits

    @property
    def head(self) -> nn.Linear | None:
        """Last dense layer with an output for each class; None if there is none."""
        dense = [part for part in self.body.modules() if isinstance(part, nn.Linear)]
        return next((part for part in reversed(dense) if part.out_features == self.config.classes), None)

    @property
    def no_decay(self) -> frozenset[str]:
        """Names of the parameters that its library trains without weight decay, such as positions."""
        named = getattr(self.body, "no_weight_decay", None)
        return frozenset(f"body.{name}" for name in named()) if callable(named) else frozenset()

    def has_batch_norm(self) -> bool:
        """True if training needs more than one value a channel in every batch."""
        return any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in self.body.modules())


def is_foreign(name: str) -> bool:
    """True for the name of a network of another library, `SOURCE:NAME`."""
    return is_own(name) or name.partition(":")[0] in _LIBRARIES


def is_function(source: str) -> bool:
    """True for `MODULE:FUNCTION`, code of the user."""
    return is_foreign(source) and source.partition(":")[0] not in _LIBRARIES


def version_of(source: str) -> str:
    """Return name and version of the installed library that builds this network; "" for code of the user."""
    library = source.partition(":")[0]
    try:
        return f"{library} {version(library)}" if library in _LIBRARIES else ""
    except PackageNotFoundError:  # a plugin may have another name than its package
        return ""


def _built(config: ForeignConfig) -> nn.Module:
    library, _, name = config.source.partition(":")
    try:
        built = _LIBRARIES.get(library, _from_function)(name, config)
    except (VitralError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # code of others raises anything
        where = _place_of(error, library)
        raise UsageError(f"{config.source} cannot be built", where=where, why=_reason(error)) from error
    if not isinstance(built, nn.Module):
        raise UsageError(f"{config.source} is no network", why=f"it returns {type_of(built)}")
    return built


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _place_of(error: Exception, module: str) -> str | None:
    """Return the last line of the user's module, or its package, that led to the error; None for a library's."""
    if module in _LIBRARIES:
        return None
    own = module.partition(".")[0]
    frames = traceback.walk_tb(error.__traceback__)
    places = [(one.f_code, line) for one, line in frames if str(one.f_globals.get("__name__")).partition(".")[0] == own]
    return f"{Path(places[-1][0].co_filename).name}, line {places[-1][1]}" if places else None


def of_library(name: str) -> str | None:
    """Name with its library, "timm:resnet50", of a network that timm or torchvision has; None for others."""
    plain = name.partition(".")[0]
    if find_spec("timm") and plain in importlib.import_module("timm").list_models():
        return f"timm:{name}"
    known = importlib.import_module("torchvision.models").list_models()
    return f"torchvision:{name}" if name in known else None


def _from_timm(name: str, config: ForeignConfig) -> nn.Module:
    try:
        timm: Any = importlib.import_module("timm")
    except ImportError as error:
        raise MissingExtraError(f"timm:{name} needs timm", hint="pip install timm") from error
    plain = name.partition(".")[0]  # a tag names weights; they are random here
    if plain not in timm.list_models():
        raise unknown("model of timm", plain, timm.list_models())
    fixed = timm.models.get_pretrained_cfg_value(plain, "fixed_input_size")
    sized = {"img_size": config.image} if fixed else {}
    built: nn.Module = timm.create_model(
        plain, pretrained=False, num_classes=config.classes, in_chans=config.channels, **sized
    )
    return built


def _from_torchvision(name: str, config: ForeignConfig) -> nn.Module:
    if config.channels != 3:  # before an import that takes seconds
        what = f"torchvision:{name} takes 3 channels, the images have {config.channels}"
        raise UsageError(what, why="torchvision builds its networks for three channels", hint="--channels 3")
    models: Any = importlib.import_module("torchvision.models")
    known = models.list_models(module=models)
    if name not in known:
        raise unknown("model of torchvision", name, known)
    options: dict[str, Any] = {"num_classes": config.classes}
    if name.startswith("vit_"):
        if config.image[0] != config.image[1]:
            raise UsageError(f"torchvision:{name} takes squares", hint=f"--image-size {max(config.image)}")
        options["image_size"] = config.image[0]
    if name in ("googlenet", "inception_v3"):  # with auxiliary heads they return several outputs in training
        options |= {"aux_logits": False, "init_weights": True}
    built: nn.Module = models.get_model(name, weights=None, **options)
    return built


def _from_function(name: str, config: ForeignConfig) -> nn.Module:
    """Call the user's function with those of `classes`, `image_size` and `channels` that it takes; copy a module."""
    part = own_part("model", config.source)
    if isinstance(part, nn.Module):
        return copy.deepcopy(part)
    given = {"classes": config.classes, "image_size": config.image, "channels": config.channels}
    parameters = inspect.signature(part).parameters.values()
    if not any(one.kind is one.VAR_KEYWORD for one in parameters):
        given = {key: value for key, value in given.items() if key in {one.name for one in parameters}}
    built: nn.Module = part(**given)
    return built


_BUILT_IN = {"timm": _from_timm, "torchvision": _from_torchvision}
_LIBRARIES: Mapping[str, Callable[[str, ForeignConfig], nn.Module]] = Extensible("vitral.networks", _BUILT_IN)
