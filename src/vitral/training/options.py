"""`Run`: one frozen dataclass with all options of a run, for Python, `config.json` and the command line."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin

import numpy as np
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import Sampler

from vitral.data.images.augmentation import Augment, Augmentation, Crop
from vitral.data.images.preprocessing import Center, Preprocessing, Resize
from vitral.data.targets import targets_of
from vitral.errors import UsageError, empty, unknown
from vitral.kinds import kinds_of, matches, named_fields, wrong_kind
from vitral.model.config import Activation, Pool
from vitral.model.own import OWN_PARTS, is_own, name_of
from vitral.training.optimizers import OPTIMIZERS
from vitral.training.other_words import by_own_names
from vitral.training.own_metrics import names_of, parts_of
from vitral.training.ranges import EXAMPLES, LIMITS
from vitral.wording import either, flag


def option(default: Any, help: str) -> Any:
    """A field of a run with its line for `--help` and the documentation."""
    return field(default=default, metadata={"help": help})


MODEL_OPTIONS = (
    "dim",
    "depth",
    "heads",
    "mlp_dim",
    "position",
    "pool",
    "cls_token",
    "registers",
    "layer_scale",
    "qk_norm",
    "pre_logits",
    "logit_scale",
    "head_bias_init",
    "activation",
    "dropout",
    "drop_path",
    "patch_dropout",
)
"""Fields of a run that override the configuration of the named model."""

PRETRAINING_OPTIONS = (
    "mask",
    "decoder_dim",
    "decoder_depth",
    "prototypes",
    "local_crops",
    "teacher_momentum",
    "teacher_temperature",
    "centering",
    "ibot",
    "koleo",
    "teacher_views",
)
"""Fields of a run that `vitral pretrain` alone reads."""
DECODER_OPTIONS = ("decoder_dim", "decoder_depth")
"""Those among them that reading text has, too."""

LABEL_OPTIONS = ("task", "label_separator", "class_folders", "class_order", "targets", "loss")
"""Fields of a run about the labels, which pretraining does not read."""


@named_fields
@dataclass(frozen=True)
class Run:
    """All options of a run. A recipe sets them; the command line and Python override single fields.

    `help(vitral.train)` lists the fields with types and meanings.

    Example:
        run = vitral.Run(epochs=10, batch_size=64, lr_batch=256)
        print(run.peak_lr)
    """

    # Data
    data: str = option("digits", "folder, .csv, .tar, .zip, IDX folder, or a name: digits, mnist, cifar10, …")
    data_root: str = option("data", "folder for data sets that vitral downloads by name, such as cifar10")
    val_fraction: float | None = option(
        None,
        "fraction of the training images to set aside for validation, if there is no val split; 0 validates on "
        "the test images, if there are any",
    )
    train_share: float = option(1.0, "random fraction of the training images to use")
    stratified: bool = option(
        False,
        "apply --train-share to every class. With the same seed, a smaller fraction is then a subset of a larger one",
    )
    split_seed: int | None = option(None, "seed of the validation split (default: --seed)")
    val_share: float = option(1.0, "random fraction of the validation images to use")
    bad_images: Literal["error", "skip"] = option(
        "error", "what to do about unreadable images: stop before training (error), or train without them (skip)"
    )
    max_bad: int | None = option(
        None, "with --bad-images skip: stop if more than N images are unreadable (default: no limit)"
    )

    # Task
    task: str = option(
        "class",
        "what to predict: class, labels (several per image), numbers or text (default: by a table's columns, or class)",
    )
    label_separator: str | None = option(None, "character between the labels in a table (default: | or ;)")
    class_folders: Literal["auto", "top", "leaf"] = option(
        "auto",
        "which folders are classes: those directly below the splits (top), or the innermost (leaf); auto: stop if "
        "this is unclear (default: auto)",
    )
    class_order: str | None = option(
        None,
        "how to order the classes of --init if the weights lack their names: natural (2 before 10), text, or a file of "
        "names",
    )
    targets: tuple[str, ...] = option((), "columns of a table to predict: numbers, or 0 and 1 for each label")
    loss: Literal["mse", "huber"] = option(
        "mse",
        "loss for numbers: squared error (mse), or huber, which outliers affect less; or your own function for any "
        "task, MODULE:FUNCTION, which maps outputs and targets to a number",
    )

    # Network
    model: str = option(
        "Pico/2",
        "network to train: Ti/16 (size Ti, patches of 16 pixels), C+Micro/8 (with a convolutional stem), a name from "
        "`vitral models`, timm:NAME, torchvision:NAME or MODULE:FUNCTION. With only --model, training usually starts "
        "from random weights; add --init for trained ones (default: the network of --init, otherwise of the recipe)",
    )
    init: str | None = option(
        None,
        "weights to start from: a run, a file, timm:NAME, hf:ORG/NAME, backbone (the built-in model), or none (random "
        "weights) (default: auto, chosen for your images)",
    )
    probe: bool = option(
        False, "before training, fit a linear probe to the initial weights, for a first accuracy within seconds"
    )
    image_size: int | tuple[int, int] = option(
        224, "size of the images as input of the network: one number, or height and width"
    )
    channels: int = option(3, "color channels: 1 for gray, 3 for color")
    dim: int | None = option(None, "width of the network (default: the model's)")
    depth: int | None = option(None, "number of layers (default: the model's)")
    heads: int | None = option(None, "attention heads per layer (default: the model's)")
    mlp_dim: int | None = option(None, "width of the MLP (default: the model's)")
    position: str | None = option(None, "position embedding: none, learned, sincos or rotary (default: the model's)")
    patch_sizes: tuple[int, ...] = option(
        (), "train for several patch sizes at once (FlexiViT); choose one later with predict --patch-size"
    )
    pool: str | None = option(None, f"pooling: {either(get_args(Pool))} (default: the model's)")
    cls_token: bool | None = option(None, "prepend a class token (default: the model's choice)")
    registers: int | None = option(None, "number of register tokens")
    layer_scale: float | None = option(None, "initial value of LayerScale")
    qk_norm: bool | None = option(None, "normalize queries and keys")
    pre_logits: bool | None = option(None, "add a tanh layer before the head, as in the ViT paper's pre-training")
    activation: str | None = option(None, f"activation: {either(get_args(Activation))} (default: the model's)")
    logit_scale: float | None = option(None, "factor by which logits are multiplied after a tanh")
    head_bias_init: float | None = option(None, "initial bias of the head")
    dropout: float | None = option(
        None, "dropout rate after dense layers and position embeddings (default: the model's)"
    )
    drop_path: float | None = option(
        None, "stochastic depth: drop rate of the last block, which grows linearly from 0 in the first"
    )
    patch_dropout: float | None = option(None, "random fraction of the patches to drop from each training image")
    whiten: bool = option(
        False, "before training, set the first layer of a convolutional stem to whiten the pixels, and freeze it"
    )
    freeze: tuple[str, ...] = option(
        (), "parameters not to train, by name or pattern, such as patch_embed 'blocks.[0-5].*'"
    )

    # Preprocessing and augmentation
    resize: Resize = option(
        "stretch",
        "how to resize images: stretch to the image size, crop the center, letterbox (add a border), or native (keep "
        "size and aspect ratio)",
    )
    crop_fraction: float = option(0.875, "fraction of the short side that --resize crop keeps")
    resize_size: tuple[int, int] | None = option(None, "height and width before the center crop")
    center: Center = option("round", "rounding of the center crop's offset")
    pack: bool = option(
        False, "keep each image's aspect ratio and size (at most --image-size), and pack images into sequences (NaViT)"
    )
    pack_min_size: int | None = option(
        None, "with --pack: draw the longest side of each training image at random, from this size up"
    )
    pack_drop: tuple[float, float] | None = option(
        None, "with --pack: fraction of the patches to drop from each training image, in the first and in the last step"
    )
    multiple: tuple[int, int] = option((1, 1), "with --pack: sides are multiples of these numbers (the patch size)")
    interpolation: str = option("bilinear", "interpolation: bilinear, bicubic, nearest, lanczos, box or hamming")
    antialias: bool = option(True, "antialias when downsampling")
    levels: tuple[int, int] | None = option(
        None,
        "pixel values that mean black and white, for gray images of 16 or more bits and images of floats, such as "
        "0 4095 for 12 bits. Without this option, floats are from 0 to 1 or from 0 to 255 (default: 0 65535 for "
        "integers)",
    )
    mean: float | tuple[float, ...] = option(0.5, "mean of the pixels (from 0 to 1): one number, or one per channel")
    std: float | tuple[float, ...] = option(0.5, "standard deviation of the pixels: one number, or one per channel")
    crop: Crop = option("none", "how to crop training images at random")
    crop_area: float = option(0.08, "smallest fraction of the area that --crop random-resized keeps")
    scaled: bool = option(
        True, "with --crop random-resized: decode large JPEGs at 1/2, 1/4 or 1/8 of their size, which is faster"
    )
    shift: float = option(0.125, "largest shift of --crop shift, as a fraction of the width")
    flip: bool = option(False, "mirror half of the training images at random")
    augment: Augment = option(
        "none",
        "augmentation of training images; affine rotates and scales a little. Or your own function, MODULE:FUNCTION, "
        "which receives and returns an image as uint8 (C, H, W)",
    )
    randaugment: tuple[int, int] = option(
        (2, 10), "with --augment randaugment: operations per image, and their magnitude from 0 to 30"
    )
    erase: float = option(0.0, "probability of random erasing")
    mixup: float = option(0.0, "α of mixup; 0 turns it off")
    cutmix: float = option(0.0, "α of CutMix; 0 turns it off")
    label_smoothing: float = option(0.0, "fraction of the label to spread over all classes")
    class_weights: Literal["none", "balanced"] = option("none", "balanced: weight the loss by inverse class frequency")
    sampling: Literal["shuffle", "balanced"] = option(
        "shuffle",
        "balanced: draw each class equally often; or your own function, MODULE:FUNCTION, which maps the labels to a "
        "weight for each image or to a torch sampler",
    )

    # Training
    epochs: int = option(100, "passes over the training images")
    minutes: float | None = option(None, "time limit of the whole command; vitral plans as many epochs as fit")
    batch_size: int = option(128, "images per step, or per micro-batch with --accumulate")
    accumulate: int = option(1, "number of micro-batches whose gradients are added up in a step")
    optimizer: str = option(
        "adamw",
        f"optimizer: {either(OPTIMIZERS)}; or your own function, MODULE:FUNCTION, which maps parameter groups to a "
        "torch optimizer",
    )
    lr: float = option(1e-3, "learning rate; with --lr-batch, it is scaled from that batch size to yours")
    lr_batch: int | None = option(
        None, "batch size that --lr is meant for; the rate is scaled to your batch size (default: not scaled)"
    )
    weight_decay: float = option(0.05, "weight decay of matrices; biases, normalization layers and tokens have none")
    momentum: float = option(0.9, "momentum of SGD, or β1 of the other optimizers")
    beta2: float = option(0.999, "β2 of Adam and AdamW")
    schedule: Literal["cosine", "linear", "constant"] = option("cosine", "decay of the learning rate after the warm-up")
    warmup: float = option(5.0, "epochs of linear warm-up")
    min_lr: float = option(0.0, "final learning rate, as a fraction of its peak")
    clip: float | None = option(1.0, "largest norm of the gradient; 0 turns clipping off")
    layer_decay: float | None = option(None, "factor by which the learning rate falls with each block below the head")
    ema: float | None = option(
        None, "decay of the averaged weights, which are validated and saved; 0 turns averaging off"
    )
    teacher: str | None = option(None, "trained network to distill from: a run, a file, timm:NAME, hf:ORG/NAME")
    distill_weight: float = option(
        0.5, "weight of the teacher in the loss; in pretraining, weight of the teacher's logits"
    )
    distill_temperature: float = option(1.0, "temperature that divides the logits of student and teacher")
    keep: Literal["best", "last"] = option(
        "best", "which weights to save: from the epoch with the best validation result, or from the last epoch"
    )
    metrics: tuple[str, ...] = option(
        (),
        "additional validation metrics: NAME=MODULE:FUNCTION. The function receives outputs and targets, and returns a "
        "number",
    )
    early_stop: int | None = option(None, "stop after this many epochs without a better validation accuracy")
    checkpointing: bool = option(False, "recompute blocks in the backward pass: less memory, more time")

    # Pretraining on images without labels
    mask: float = option(0.75, "fraction of the patches that mae and mpp mask or corrupt")
    decoder_dim: int | None = option(
        None,
        "width of the decoder for mae or --task text (default: half the network's for mae, otherwise the network's)",
    )
    decoder_depth: int = option(2, "layers of the decoder for mae or for --task text")
    prototypes: int = option(4096, "prototypes to which dino assigns images")
    local_crops: int = option(4, "small crops of each image that dino's student sees besides two large ones")
    teacher_momentum: float = option(0.996, "fraction of dino's teacher that a step keeps; it rises to 1")
    teacher_temperature: float = option(0.04, "temperature of dino's teacher; lower is sharper")
    centering: Literal["mean", "sinkhorn"] = option(
        "mean", "balance of dino's prototypes: subtract a running mean (DINO), or assign a batch evenly (DINOv2)"
    )
    ibot: float = option(0.0, "with dino: weight of the iBOT loss on masked patches (0 turns it off)")
    koleo: float = option(
        0.0, "with dino: weight of the KoLeo loss, which keeps features apart, about 0.1 (0 turns it off)"
    )
    teacher_views: int = option(
        0,
        "crops of each image for which distill keeps the teacher's features on disk; 0 computes them in every step",
    )

    # Execution
    device: str = option("auto", "device to compute on: auto, cpu, cuda or mps")
    precision: str = option("auto", "number format: auto, bf16 or fp32")
    threads: int | None = option(None, "CPU threads (default: chosen by a short trial, at most OMP_NUM_THREADS)")
    compile: bool | None = option(None, "use torch.compile (default: if it saves time in this run)")
    plain: bool = option(False, "use only PyTorch's own operators, without vitral's kernels: slower, for comparison")
    graphs: bool | None = option(None, "on a GPU, replay steps as a captured CUDA graph (default: if possible)")
    residency: Literal["auto", "memory", "cache", "stream"] = option(
        "auto",
        "where decoded images are kept: in memory, in the cache on disk, or nowhere (stream: decode in every epoch); "
        "auto: the first that fits, but JPEGs that a GPU decodes are streamed (default: auto)",
    )
    strategy: Literal["auto", "ddp", "fsdp", "hsdp", "offload"] = option(
        "auto",
        "how several processes divide the network: not at all (ddp), among all processes (fsdp), within each machine "
        "(hsdp), or in the CPU's memory (offload); auto takes the first that fits (default: auto)",
    )
    workers: int | None = option(None, "worker processes that decode images (default: by the number of cores)")
    seed: int = option(0, "seed of the split, the initial weights, the order, and the augmentation")
    recipe: str = option(
        "small",
        "set of defaults, such as backbone (for the built-in model), small (from random weights), finetune (for other "
        "weights), linear-probe, or paper",
    )
    log: tuple[str, ...] = option((), "also write metrics to these trackers: csv, tensorboard, wandb, mlflow")
    out: str | None = option(None, "folder of the run")

    def __post_init__(self) -> None:
        _check_types(self)
        if isinstance(self.image_size, int):
            object.__setattr__(self, "image_size", (self.image_size, self.image_size))
        if self.optimizer not in OPTIMIZERS and not is_own(self.optimizer):
            raise unknown("optimizer", self.optimizer, OPTIMIZERS)
        targets_of(self.task)
        parts_of(self.metrics)
        for allowed, names in LIMITS.items():
            for name in names:
                value = getattr(self, name)
                numbers = value if isinstance(value, tuple) else () if value is None else (value,)
                if any(one not in allowed for one in numbers):
                    raise UsageError(f"{flag(name)} must be {allowed}, not {_as_typed(value)}", hint=_example(name))

        if self.channels not in (1, 3):
            raise UsageError(f"--channels must be 1 or 3, not {self.channels}", hint=_example("channels"))

    @property
    def step_batch(self) -> int:
        """Images per optimizer step."""
        return self.batch_size * self.accumulate

    @property
    def peak_lr(self) -> float:
        """The learning rate after warm-up: `lr`, scaled linearly from `lr_batch` to this run's batch."""
        return self.lr if self.lr_batch is None else self.lr * self.step_batch / self.lr_batch

    def model_changes(self) -> dict[str, Any]:
        """Fields of the network's configuration that this run overrides."""
        given = {name: getattr(self, name) for name in MODEL_OPTIONS if getattr(self, name) is not None}
        return {"image_size": self.size, "channels": self.channels, **given}

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return self.image_size  # type: ignore[return-value]

    @property
    def preprocessing(self) -> Preprocessing:
        """Preprocessing of the network."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(Preprocessing)}
        for name in ("mean", "std"):
            values[name] = values[name] if isinstance(values[name], tuple) else (values[name],) * self.channels
        return Preprocessing(**values)

    @property
    def augmentation(self) -> Augmentation:
        """Augmentation of training images."""
        names = [f.name for f in dataclasses.fields(Augmentation)]
        return Augmentation(**{name: getattr(self, name) for name in names})

    def to_json(self) -> dict[str, Any]:
        """Convert to plain data, for `from_json`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Run:
        """Read the form that `to_json` writes. The schema is closed: an unknown field raises `UsageError`."""
        return cls(**checked_options(data))


def _example(name: str) -> str:
    """An option with a valid value, as typed."""
    value = EXAMPLES.get(name, next(f.default for f in dataclasses.fields(Run) if f.name == name))
    return " ".join([flag(name), *map(str, value if isinstance(value, tuple) else (value,))])


def _check_types(run: Run) -> None:
    """Refuse a value of the wrong type: a misspelled choice must not fall through to another branch."""
    for name, kind in kinds_of(Run).items():
        value, choices = getattr(run, name), get_args(kind) if get_origin(kind) is Literal else ()
        if value == "" and not choices:
            hint = "vitral train photos/" if name == "data" else "leave it out, or give it a value"
            raise empty("DATA" if name == "data" else flag(name), hint)
        if name in OWN_PARTS and is_own(value):
            continue
        if choices and value not in choices:
            shown = value if isinstance(value, str) else f"{value!r:.60}"
            own = "choose one of these, or pass a function of yours" if name in OWN_PARTS else None
            raise unknown(f"choice for {flag(name)}:", shown, choices, own)
        if not choices and not matches(value, kind):
            raise wrong_kind(flag(name), value, Run.__annotations__[name])


def _as_typed(value: object) -> str:
    """Format a value as typed; one side of a square."""
    return " ".join(map(str, dict.fromkeys(value))) if isinstance(value, tuple) else str(value)


def checked_options(options: dict[str, Any]) -> dict[str, Any]:
    """Convert options to the types of `Run`: lists to tuples, paths to text; an unknown name raises, with the nearest
    known ones.
    """
    names = [f.name for f in dataclasses.fields(Run)]
    options = by_own_names(options)
    if bad := [name for name in options if name not in names]:
        raise unknown("option", bad[0], names)
    return {name: _plain(name, value) for name, value in options.items()}


def _plain(name: str, value: Any) -> Any:
    if name == "metrics":
        return names_of(value)
    if name in OWN_PARTS and (callable(value) or isinstance(value, Sampler)):
        return name_of(name, value)
    if isinstance(value, Optimizer):
        why = "vitral creates the optimizer itself, after the network"
        hint = "optimizer=torch.optim.SGD, or lambda groups: torch.optim.SGD(groups, lr=0.1)"
        raise UsageError(f"{flag(name)} must be a class or a function, not an optimizer", why=why, hint=hint)
    if isinstance(value, np.ndarray | Tensor):
        return _plain(name, value.tolist())
    if isinstance(value, list):
        if any(map(callable, value)):
            hint = "combine them: torchvision.transforms.v2.Compose([…])" if name == "augment" else "pass one"
            raise UsageError(f"{flag(name)} cannot be a list of functions", hint=hint)
        return tuple(value)
    return os.fspath(value) if isinstance(value, os.PathLike) else value
