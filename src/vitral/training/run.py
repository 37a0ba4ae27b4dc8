"""A run is data: one frozen dataclass holds every choice, in Python, in `config.json` and on the command line alike."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import IO, Any, Literal, Union, get_args, get_origin, get_type_hints

from vitral.console import flag
from vitral.data.contents import Contents
from vitral.data.transforms import Augment, Augmentation, Centre, Crop, Preprocessing, Resize
from vitral.errors import RunError, TrainingError, UsageError, empty, unknown

fcntl: Any
try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None


def option(default: Any, help: str) -> Any:
    """A field of a run with the line that `--help` and the documentation show for it."""
    return field(default=default, metadata={"help": help})


MODEL_OPTIONS = (
    "dim", "depth", "heads", "mlp_dim", "position", "pool", "cls_token", "registers", "layer_scale", "qk_norm",
    "pre_logits", "logit_scale", "head_bias_init", "activation", "dropout", "drop_path", "patch_dropout",
)  # fmt: skip
"""Fields of a run that change the network that its model's name stands for."""


@dataclass(frozen=True)
class Run:
    """Everything that decides a run. A recipe fills it, the command line and Python change single fields of it."""

    # What to learn from
    data: str = option("digits", "folder, .csv, .tar, .zip, IDX folder, or a name: digits, mnist, cifar10, …")
    data_root: str = option("data", "where named sets are looked for and downloaded to")
    val_fraction: float | None = option(
        None, "share of the training pictures kept for validation where the data have none; 0 validates on test"
    )
    train_share: float = option(1.0, "random share of the training pictures to use")
    val_share: float = option(1.0, "random share of the validation pictures to use")
    bad_images: Literal["error", "skip"] = option(
        "error", "unreadable pictures: stop before training, or leave them out"
    )

    # The network
    model: str = option(
        "Pico/2", "size and patch (Ti/16, S/4), with a stem (C+Micro/8), or a write-up; see `vitral models`"
    )
    init: str | None = option(
        None, "weights to start from: a run, a file of any known format, timm:NAME, hf:ORG/NAME, demo"
    )
    image_size: int | tuple[int, int] = option(224, "pixels: one number, or height and width")
    channels: int = option(3, "1 for grey, 3 for colour")
    dim: int | None = option(None, "width, instead of the model's")
    depth: int | None = option(None, "layers, instead of the model's")
    heads: int | None = option(None, "attention heads, instead of the model's")
    mlp_dim: int | None = option(None, "width of the MLP, instead of the model's")
    position: str | None = option(None, "none, learned, sincos or rotary, instead of the model's")
    pool: str | None = option(None, "cls, mean, mean-all or map, instead of the model's")
    cls_token: bool | None = option(None, "whether there is a class token, instead of the model's choice")
    registers: int | None = option(None, "register tokens")
    layer_scale: float | None = option(None, "LayerScale's initial value")
    qk_norm: bool | None = option(None, "normalise queries and keys")
    pre_logits: bool | None = option(None, "tanh layer before the head, as at the paper's pre-training")
    activation: str | None = option(None, "gelu, gelu-tanh (the authors' JAX code) or swiglu, instead of the model's")
    logit_scale: float | None = option(None, "factor on logits that a tanh bounds")
    head_bias_init: float | None = option(None, "initial bias of the head")
    dropout: float | None = option(None, "dropout after dense layers and positions, instead of the model's")
    drop_path: float | None = option(None, "stochastic depth of the last block, growing linearly")
    patch_dropout: float | None = option(None, "random share of its patches that a training picture loses")
    whiten: bool = option(
        False, "before training, make a convolutional stem's first layer decorrelate the pictures' pixels; it stays so"
    )
    freeze: tuple[str, ...] = option((), "parameters not to train, by name or pattern: patch_embed 'blocks.[0-5].*'")

    # What it sees
    resize: Resize = option("stretch", "how pictures come to the image size: stretch, crop or letterbox")
    crop_fraction: float = option(0.875, "what resize crop keeps of the short side")
    resize_size: tuple[int, int] | None = option(None, "height and width before the centre is cut, where given")
    centre: Centre = option("round", "the middle between two pixels: round or floor")
    interpolation: str = option("bilinear", "bilinear, bicubic, nearest, lanczos, box or hamming")
    antialias: bool = option(True, "smooth what is made smaller")
    mean: float | tuple[float, ...] = option(0.5, "mean of the pixels (0..1), one number or one a channel")
    std: float | tuple[float, ...] = option(0.5, "standard deviation of the pixels")
    crop: Crop = option("none", "random geometry in training: none, shift or random-resized")
    crop_area: float = option(0.08, "smallest share of the picture that random-resized keeps")
    scaled: bool = option(True, "decode large JPEGs that are cropped at random at 1/2, 1/4 or 1/8 of their size")
    shift: float = option(0.125, "farthest that shift goes, as a share of the width")
    flip: bool = option(False, "mirror half of the training pictures")
    augment: Augment = option("none", "none, affine (turned and scaled a little), randaugment or trivialaugment")
    randaugment: tuple[int, int] = option((2, 10), "operations a picture, and their magnitude (0..30)")
    erase: float = option(0.0, "probability of random erasing")
    mixup: float = option(0.0, "mixup's α; 0 is off")
    cutmix: float = option(0.0, "CutMix's α; 0 is off")
    label_smoothing: float = option(0.0, "share of the label spread over all classes")
    class_weights: Literal["none", "balanced"] = option("none", "weigh the loss by the inverse frequency of the class")
    sampling: Literal["shuffle", "balanced"] = option("shuffle", "balanced draws each class equally often")

    # How it learns
    epochs: int = option(100, "passes over the training pictures")
    minutes: float | None = option(None, "time to train and validate in: the plan takes as many epochs as fit")
    start_size: int | tuple[int, int] | None = option(
        None, "pixels at which training begins; pictures grow to the image size in two thirds of the steps"
    )
    batch_size: int = option(128, "pictures a step, per accumulation part")
    accumulate: int = option(1, "batches whose gradients are added up before a step")
    optimizer: str = option("adamw", "adamw, adam, sgd or muon")
    lr: float = option(1e-3, "learning rate; of a batch of `lr_batch` where that is given")
    lr_batch: int | None = option(
        None, "batch that `lr` is meant for: the rate is scaled to yours; not given, it is as it is"
    )
    weight_decay: float = option(0.05, "decay of matrices (biases, norms and tokens have none)")
    momentum: float = option(0.9, "of SGD, and β1 of the others")
    beta2: float = option(0.999, "β2 of Adam and AdamW")
    schedule: Literal["cosine", "linear", "constant"] = option("cosine", "how the rate falls after the warm-up")
    warmup: float = option(5.0, "epochs in which the rate rises linearly")
    min_lr: float = option(0.0, "where the rate ends, as a share of its peak")
    clip: float | None = option(1.0, "largest norm of the gradient; 0 is off")
    layer_decay: float | None = option(None, "factor on the learning rate for each block away from the head")
    ema: float | None = option(None, "decay of the averaged weights that are validated and kept; 0 is off")
    teacher: str | None = option(None, "trained network to learn from as well: a run, a file, timm:NAME, hf:ORG/NAME")
    distill_weight: float = option(0.5, "share of the loss that is the teacher's")
    distill_temperature: float = option(1.0, "divides the logits of both where they are compared")
    early_stop: int | None = option(None, "stop after this many epochs without a better validation accuracy")
    checkpointing: bool = option(False, "recompute blocks in the backward pass: less memory, more time")

    # Where and how it runs
    device: str = option("auto", "auto, cpu, cuda or mps")
    precision: str = option("auto", "auto, bf16 or fp32")
    compile: bool | None = option(None, "compile the network with torch.compile; by default where it pays in this run")
    plain: bool = option(False, "torch's own operators alone, without kernels of ours: slower, to compare with")
    graphs: bool | None = option(
        None, "on a GPU, repeat steps as a recorded CUDA graph; by default where they can be recorded"
    )
    residency: Literal["auto", "memory", "cache", "stream"] = option(
        "auto", "decoded pictures: keep them in memory or in the cache on disk, or stream them; auto: where they fit"
    )
    workers: int | None = option(None, "worker processes that stream; not given, as many as fit the machine")
    seed: int = option(0, "decides split, initialisation, order and augmentation")
    recipe: str = option("small", "small, paper, linear-probe, …; see docs/recipes.md")
    out: str | None = option(None, "run folder")

    def __post_init__(self) -> None:
        from vitral.training.optimizers import OPTIMIZERS

        _check_kinds(self)
        for name in ("image_size", "start_size"):
            if isinstance(size := getattr(self, name), int):
                object.__setattr__(self, name, (size, size))
        if self.optimizer not in OPTIMIZERS:
            raise unknown("optimizer", self.optimizer, OPTIMIZERS)
        for names, fits, must in _LIMITS:
            for name in names:
                value = getattr(self, name)
                if value is not None and not all(map(fits, value if isinstance(value, tuple) else (value,))):
                    raise UsageError(f"{flag(name)} must be {must}, not {_shown(value)}")
        if not 0 <= self.randaugment[1] <= 30:
            raise UsageError(f"--randaugment takes a magnitude from 0 to 30, not {self.randaugment[1]}")

    @property
    def step_batch(self) -> int:
        """Pictures a step of the optimizer."""
        return self.batch_size * self.accumulate

    @property
    def peak_lr(self) -> float:
        """The learning rate after warm-up: `lr`, scaled linearly from `lr_batch` to this run's batch."""
        return self.lr if self.lr_batch is None else self.lr * self.step_batch / self.lr_batch

    def model_changes(self) -> dict[str, Any]:
        """The fields of the network's configuration that this run sets."""
        given = {name: getattr(self, name) for name in MODEL_OPTIONS if getattr(self, name) is not None}
        return {"image_size": self.size, "channels": self.channels, **given}

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return self.image_size  # type: ignore[return-value]

    @property
    def start(self) -> tuple[int, int]:
        """Height and width in pixels at which training begins."""
        return self.start_size or self.size  # type: ignore[return-value]

    @property
    def preprocessing(self) -> Preprocessing:
        """What the network is to expect of a picture."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(Preprocessing)}
        for name in ("mean", "std"):
            values[name] = values[name] if isinstance(values[name], tuple) else (values[name],) * self.channels
        return Preprocessing(**values)

    @property
    def augmentation(self) -> Augmentation:
        """How training pictures vary."""
        names = [f.name for f in dataclasses.fields(Augmentation)]
        return Augmentation(**{name: getattr(self, name) for name in names})

    def to_json(self) -> dict[str, Any]:
        """Plain data; `from_json` is the way back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Run:
        """Read `to_json`'s form. The schema is closed: a field that is not known raises `UsageError`."""
        return cls(**checked_options(data))


_LIMITS: tuple[tuple[tuple[str, ...], Callable[[float], bool], str], ...] = (
    (
        ("epochs", "batch_size", "accumulate", "channels", "image_size", "start_size", "resize_size", "lr_batch"),
        lambda v: v >= 1,
        "at least 1",
    ),
    (
        ("lr", "warmup", "weight_decay", "mixup", "cutmix", "clip", "early_stop", "workers", "randaugment", "seed"),
        lambda v: 0 <= v < math.inf,
        "0 or more",
    ),
    (("erase", "label_smoothing", "val_share", "min_lr", "distill_weight"), lambda v: 0 <= v <= 1, "from 0 to 1"),
    (("train_share", "crop_area", "crop_fraction", "shift"), lambda v: 0 < v <= 1, "above 0 and at most 1"),
    (("momentum", "beta2", "val_fraction", "ema"), lambda v: 0 <= v < 1, "from 0 to below 1"),
    (("layer_decay",), lambda v: 0 <= v <= 1, "from 0 to 1"),
    (("logit_scale", "distill_temperature", "minutes"), lambda v: 0 < v < math.inf, "above 0"),
)
"""Fields, what each number of them must satisfy, and how that is said."""


def _check_kinds(run: Run) -> None:
    """Refuse a value of another kind than its field's: a misspelt choice must not fall through to some other branch."""
    for name, kind in get_type_hints(Run).items():
        value = getattr(run, name)
        options = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
        choices = [choice for option in options if get_origin(option) is Literal for choice in get_args(option)]
        if value == "" and not choices:
            hint = "vitral train photos/" if name == "data" else "leave it out, or give it a value"
            raise empty("DATA" if name == "data" else flag(name), hint)
        if choices and value not in choices:
            raise unknown(f"choice for {flag(name)}:", value, choices)
        if not choices and not any(_is(value, option) for option in options):
            raise UsageError(f"{flag(name)} cannot be {_shown(value)}", why=f"it is {Run.__annotations__[name]}")


def _is(value: object, kind: Any) -> bool:
    if get_origin(kind) is tuple:
        inner = get_args(kind)
        same = isinstance(value, tuple) and (inner[-1] is Ellipsis or len(value) == len(inner))
        return same and all(_is(one, inner[0]) for one in value)  # type: ignore[attr-defined]
    if kind is bool or isinstance(value, bool):
        return type(value) is kind
    return isinstance(value, (float, int) if kind is float else kind)


def _shown(value: object) -> str:
    """As it was typed; of a square one side."""
    return " ".join(map(str, dict.fromkeys(value))) if isinstance(value, tuple) else str(value)


def checked_options(options: dict[str, Any]) -> dict[str, Any]:
    """Options by name as `Run` takes them: lists become tuples and paths text; an unknown name raises with the nearest
    known ones.
    """
    names = [f.name for f in dataclasses.fields(Run)]
    if bad := [name for name in options if name not in names]:
        raise unknown("option", bad[0], names)
    return {name: _plain(value) for name, value in options.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(value)
    return os.fspath(value) if isinstance(value, os.PathLike) else value


@dataclass(frozen=True)
class Choice:
    """A line of the plan: what was chosen and why."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True)
class Plan:
    """A complete run and the reasons for its choices."""

    run: Run
    choices: tuple[Choice, ...] = ()
    paths: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Of a saved run, by option: where that lies which its path named when it began."""
    contents: Contents | None = None
    """What the data held when the run was planned; None of a run from before this was kept."""
    command: str = ""
    """Of a saved run: what was typed."""

    @property
    def anew(self) -> str:
        """Of a saved run: what to type where it cannot go on."""
        return f"begin again: {self.command} --overwrite (or another --out)"

    def located(self, option: str) -> Any:
        """An option that may be a path, as it was typed; but where that is something else from here, or nothing, the
        path on which the run found it, as long as it is there.
        """
        typed, kept = getattr(self.run, option), self.paths.get(option)
        if kept is None or not os.path.exists(kept):
            return typed
        here = os.path.expanduser(typed)
        return typed if os.path.exists(here) and os.path.samefile(here, kept) else kept


class RunFolder:
    """The files of a run; the one place that knows their names."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.config = self.path / "config.json"
        self.metrics = self.path / "metrics.jsonl"
        self.result = self.path / "result.json"
        self.weights = self.path / "model.safetensors"
        self.last = self.path / "checkpoints" / "last.safetensors"
        self.report = self.path / "report.html"
        self._lock = self.path / ".lock"

    def exists(self) -> bool:
        """Whether there is anything in the way of a new run."""
        return self.path.exists() and (not self.path.is_dir() or any(x != self._lock for x in self.path.iterdir()))

    @contextmanager
    def held(self) -> Iterator[None]:
        """While this process trains the run; `RunError` where another one does, `TrainingError` where nothing can be
        written. The system knows when it has ended, however that was. On Windows, and on file systems without locks,
        nobody is kept out.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            file = open(self._lock, "a")  # noqa: SIM115 - it is closed below
        except OSError as error:
            hint = "make room, or check that you may write there"
            raise TrainingError("cannot write", where=self.path, why=str(error), hint=hint) from error
        with file:
            if not self._locked(file):
                raise self._in_use()
            try:
                yield
            finally:
                self._lock.unlink(missing_ok=True)

    def check_free(self) -> None:
        """`RunError` where another process trains the run at this moment."""
        with suppress(OSError), open(self._lock, "r+") as file:  # without that file nobody does
            if not self._locked(file):
                raise self._in_use()

    def _in_use(self) -> RunError:
        hint = "wait until it is done, or stop it; a run of its own: --out …"
        return RunError("another process trains this run", where=self.path, hint=hint)

    def _locked(self, file: IO[str]) -> bool:
        """Whether this process has the lock now, and it is still the one that others would find."""
        if fcntl is None:
            return True
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno not in (errno.EACCES, errno.EAGAIN)
        try:
            return os.path.samestat(os.fstat(file.fileno()), os.stat(self._lock))
        except FileNotFoundError:
            return False

    def clear(self) -> None:
        """Take away what is in it, of a run that is `held`."""
        for inside in self.path.iterdir():
            if inside.is_dir() and not inside.is_symlink():
                shutil.rmtree(inside)
            elif inside != self._lock:
                inside.unlink()

    def is_run(self) -> bool:
        """Whether this is the folder of a run."""
        return self.config.is_file()

    def epochs(self) -> int:
        """How many epochs the metrics have."""
        return len(self.metrics.read_text("utf-8").splitlines()) if self.metrics.is_file() else 0

    def read_result(self) -> dict[str, Any]:
        """What a finished run has in result.json; `RunError` where it is damaged."""
        try:
            return dict(json.loads(self.result.read_text("utf-8")))
        except (ValueError, TypeError) as error:
            hint = f"vitral evaluate {self.path} measures it again; without that file --resume ends the run anew"
            raise RunError("cannot read the run's result", where=self.result, why=str(error), hint=hint) from error

    def read_plan(self) -> Plan:
        """The run that the folder holds; `RunError` where it holds none or a damaged one."""
        if not self.is_run():
            why = "there is no config.json in it" if self.path.is_dir() else "there is no such folder"
            raise RunError("not a run folder", where=self.path, why=why, hint="ls runs")
        try:
            data = json.loads(self.config.read_text("utf-8"))
            start = os.path.realpath(self.path)
            paths = {name: os.path.normpath(os.path.join(start, way)) for name, way in data.get("paths", {}).items()}
            choices = tuple(Choice(**choice) for choice in data["plan"])
            contents = Contents.from_json(data["data"]) if "data" in data else None
            return Plan(Run.from_json(data["run"]), choices, paths, contents, data.get("command", ""))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            why = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            hint = f"put a copy of it back; vitral predict {self.path} PICTURE does without"
            raise RunError("cannot read the run's configuration", where=self.config, why=why, hint=hint) from error
