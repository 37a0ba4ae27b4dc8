"""Networks that transformers has no class for, written with a modeling file that it runs without vitral."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from torch import Tensor

import vitral
from images import noise
from vitral.data.images.preprocessing import Preprocessing
from vitral.errors import WeightsError
from vitral.model import BiTConfig, ViTConfig, network
from vitral.model.position import Rope
from vitral.model.variants import BITS, CONV_STEMMED, HYBRIDS, SIZES, WITH_PRESET, WRITE_UPS, config
from vitral.testing.formats import randomized
from vitral.weights.convert import convert, write
from vitral.weights.formats.huggingface_code import MODELING, code
from vitral.weights.load import read
from vitral.weights.native import Weights, build, save

CLASSES = ("b", "10", "a")
SMALL: dict[str, Any] = {
    "image_size": (32, 24),
    "patch_size": 8,
    "classes": 3,
    "dim": 48,
    "depth": 2,
    "heads": 3,
    "mlp_dim": 80,
}
STEM = {"conv_stem": ((16, 2), (24, 2), (24, 1))}
OPTIONS: dict[str, dict[str, Any]] = {
    "stem": STEM,
    "deep-stem": {**STEM, "conv_pool": True, "pool": "mean", "cls_token": False},
    "gray": {**STEM, "channels": 1},
    "hybrid": {"stem": (1, 2)},
    "hybrid-of-timm": {"stem": (2,), "stem_numerics": "timm", "channels": 1, "image_size": (40, 24)},
    "hybrid-root": {"stem": (), "pool": "mean", "patch_size": (8, 4)},
    "rotary": {"position": "rotary", "registers": 2},
    "rope-axial": {"rope": Rope(reference=(3, 5), offset=0.5, columns_first=True), "pool": "mean"},
    "rope-mixed": {"rope": Rope("mixed", adjacent=False), "position": "none"},
    "map": {"pool": "map", "registers": 1, "pool_prefix": False, "pool_heads": 6},
    "cls-mean": {**STEM, "pool": "cls-mean", "final_norm": "pooled"},
    "distilled": {**STEM, "dist_token": True},
    "registers": {**STEM, "registers": 3, "register_position": True},
    "no-position": {**STEM, "position": "none", "cls_position": False},
    "sincos": {**STEM, "position": "sincos"},
    "post": {"norm": "post", "attention_scale": "model", "pool": "mean-all"},
    "res-post": {"norm": "res-post", "layer_scale": 0.1, "norm_pre": True, "qk_norm": True, "pre_logits": True},
    "inner-norms": {"attn_norm": True, "mlp_norm": True, "activation": "swiglu", "pool": "map"},
    "tanh": {"pre_logits": True, "logits_tanh": True, "logit_scale": 3.0, "activation": "quick-gelu"},
    "plain": {
        **STEM,
        "qkv_bias": False,
        "proj_bias": False,
        "mlp_bias": False,
        "patch_bias": False,
        "activation": "silu",
    },
}
RESNETS: dict[str, dict[str, Any]] = {
    "bit": {},
    "bit-of-timm": {"numerics": "timm", "width": 2},
    "bit-of-big-vision": {"numerics": "big_vision", "layers": (2,)},
    "bit-gray": {"channels": 1},
}
SHAPES: dict[str, ViTConfig | BiTConfig] = {
    **{name: ViTConfig(**{**SMALL, **options}) for name, options in OPTIONS.items()},
    **{
        name: BiTConfig(**{"image_size": (33, 47), "classes": 3, "layers": (1, 2), **options})
        for name, options in RESNETS.items()
    },
}


def weights_of(shape: ViTConfig | BiTConfig, output: dict[str, Any] | None = None) -> Weights:
    model = randomized(network(shape))
    for buffer in model.buffers():  # statistics of batch norms
        buffer.copy_(torch.rand(buffer.shape) + 0.5)
    names = CLASSES if shape.classes == len(CLASSES) else tuple(map(str, range(shape.classes)))
    preprocessing = Preprocessing(
        shape.image, shape.channels, mean=(0.4,) * shape.channels, std=(0.3,) * shape.channels
    )
    return Weights(shape, model.state_dict(), preprocessing, names, {}, output or {})


def images_of(shape: ViTConfig | BiTConfig) -> Tensor:
    return torch.randn(2, shape.channels, *shape.image, generator=torch.Generator().manual_seed(1))


def assert_equal(weights: Weights, folder: Path) -> None:
    """The same logits in transformers as here, and every tensor in its place."""
    theirs, about = transformers.AutoModelForImageClassification.from_pretrained(
        folder, trust_remote_code=True, output_loading_info=True
    )
    assert {key: value for key, value in about.items() if value and key != "error_msgs"} == {}
    images = images_of(weights.config)
    with torch.no_grad():
        found, wanted = theirs.eval()(images).logits, build(weights)(images)
    torch.testing.assert_close(found, wanted, atol=1e-5 * float(wanted.abs().max()), rtol=0)


@pytest.mark.parametrize("name", SHAPES)
def test_options_that_transformers_lacks(name, tmp_path):
    weights = weights_of(SHAPES[name])
    assert tmp_path / name / MODELING in write(weights, tmp_path / name, "hf")
    assert_equal(weights, tmp_path / name)
    back = read(tmp_path / name)
    assert back.weights.classes == CLASSES
    images = images_of(weights.config)
    with torch.no_grad():
        torch.testing.assert_close(back.build()(images), build(weights)(images), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "name",
    [
        *(f"{size}/16" for size in SIZES if size not in ("e", "G", "G-opt")),
        *WITH_PRESET,
        *CONV_STEMMED,
        *HYBRIDS,
        *WRITE_UPS,
    ],
)
def test_every_named_network_is_computed(name, tmp_path):
    """Of two blocks, where the whole network is large; by a class of transformers or by the file."""
    shape = config(name)
    size = {} if name in WRITE_UPS else {"image_size": tuple(2 * side for side in shape.patch)}
    weights = weights_of(dataclasses.replace(shape, depth=min(2, shape.depth), classes=3, **size))
    write(weights, tmp_path / "there", "hf")
    assert_equal(weights, tmp_path / "there")


@pytest.mark.parametrize("name", BITS)
def test_every_named_resnet_is_computed(name, tmp_path):
    """Of one or two bottlenecks in each stage: more differ in their number alone."""
    shape = config(name, classes=3, image_size=(65, 40))
    layers = tuple(min(count, 2 if shape.width == 1 else 1) for count in shape.layers)
    weights = weights_of(dataclasses.replace(shape, layers=layers))
    write(weights, tmp_path / "there", "hf")
    assert_equal(weights, tmp_path / "there")


@pytest.mark.parametrize("name", ["stem", "hybrid", "bit"])
def test_a_network_without_classes_is_refused(name, tmp_path):
    weights = weights_of(dataclasses.replace(SHAPES[name], classes=0))
    with pytest.raises(WeightsError, match="a modeling file is for networks with classes") as caught:
        write(weights, tmp_path / "there", "hf")
    assert caught.value.hint == "--to native writes any network"
    assert not (tmp_path / "there").exists()


def test_pipelines_answer_as_the_runs_do_from_files_without_vitral(tmp_path):
    """Probabilities at the temperature, from image files, by one process that has no vitral."""
    names = ["stem", "gray", "hybrid", "bit", "bit-gray"]
    for name in names:
        shape, folder = SHAPES[name], tmp_path / name
        folder.mkdir()
        save(folder / "run.safetensors", weights_of(shape, {"task": "class", "temperature": 2.5}))
        report = convert(folder / "run.safetensors", folder / "out", "hf")
        assert any("trust_remote_code=True" in note for note in report.notes)
        image = noise(3, (24, 32), shape.channels).squeeze()
        Image.fromarray(image).resize(shape.image[::-1]).save(folder / "image.png")
    program = (
        "import sys; sys.modules['vitral'] = None\n"
        "import json; from transformers import pipeline\n"
        "for name in sys.argv[1:]:\n"
        "    kind = 'image-classification'\n"
        "    classify = pipeline(kind, model=f'{name}/out', trust_remote_code=True, device='cpu')\n"
        "    print(json.dumps({one['label']: one['score'] for one in classify(f'{name}/image.png')}))\n"
    )
    words = [sys.executable, "-c", program, *names]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    for name, found in zip(names, answers, strict=True):
        folder = tmp_path / name
        wanted = vitral.load(folder / "run.safetensors", device="cpu", precision="fp32")(folder / "image.png")
        np.testing.assert_allclose([found[name] for name in CLASSES], wanted.probabilities, atol=2e-4)
        again = vitral.load(folder / "out", device="cpu", precision="fp32")(folder / "image.png")
        np.testing.assert_allclose(again.probabilities, wanted.probabilities, atol=1e-5)


def test_the_file_holds_the_parts_of_this_network_alone():
    texts = {name: code(shape) for name, shape in SHAPES.items()}
    for part, holders in {
        "class ConvLayer": ["stem", "deep-stem", "gray"],
        "class StdConv2d": ["hybrid", "hybrid-root", "bit"],
        "class Bottleneck": ["hybrid", "bit"],
        "def pad_same": ["hybrid", "hybrid-root"],
        "class Attention": ["stem", "deep-stem", "gray", "hybrid", "hybrid-root", "post"],
    }.items():
        for name in ("stem", "deep-stem", "gray", "hybrid", "hybrid-root", "bit", "post"):
            assert (part in texts[name]) == (name in holders), (part, name)
    for text in texts.values():
        compile(text, MODELING, "exec")
        assert "import vitral" not in text
        assert "from vitral" not in text
        assert max(map(len, text.splitlines())) <= 140
        assert "\n\n\n\n" not in text
        assert text.endswith("\n")
        assert len(text.splitlines()) < 240


@pytest.mark.parametrize("name", ["stem", "gray", "hybrid", "rotary", "rope-mixed", "bit"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_transformers_saves_is_read_again(name, dtype, tmp_path):
    """Its `save_pretrained` keeps config.json and drops the header of the weights."""
    weights = weights_of(SHAPES[name])
    write(weights, tmp_path / "first", "hf")
    automatic = transformers.AutoModelForImageClassification
    theirs = automatic.from_pretrained(tmp_path / "first", trust_remote_code=True, dtype=dtype)
    theirs.save_pretrained(tmp_path / "again")
    back = read(tmp_path / "again")
    assert (back.weights.classes, back.weights.config) == (CLASSES, weights.config)
    assert back.weights.preprocessing == weights.preprocessing
    images = images_of(weights.config)
    with torch.no_grad():
        found, wanted = back.build()(images), theirs.float().eval()(images).logits
    torch.testing.assert_close(found, wanted, atol=1e-5 * float(wanted.abs().max()), rtol=0)


def test_other_classes_of_a_fine_tuned_network_are_read(tmp_path):
    write(weights_of(SHAPES["stem"]), tmp_path / "first", "hf")
    theirs = transformers.AutoModelForImageClassification.from_pretrained(
        tmp_path / "first",
        trust_remote_code=True,
        num_labels=2,
        id2label={0: "x", 1: "y"},
        label2id={"x": 0, "y": 1},
        ignore_mismatched_sizes=True,
    )
    theirs.save_pretrained(tmp_path / "again")
    predictor = vitral.load(tmp_path / "again", device="cpu", precision="fp32")
    assert predictor.classes == ("x", "y")
    assert predictor(noise(0, (32, 24), 3)).probabilities.shape == (2,)
    header = json.loads((tmp_path / "again" / "config.json").read_text())
    for damaged in ({"model": 3}, {"model": {"dim": "x"}, "preprocessing": {}}, {}):
        (tmp_path / "again" / "config.json").write_text(json.dumps({**header, "vitral": damaged}))
        with pytest.raises(WeightsError, match="damaged header"):
            read(tmp_path / "again")


@pytest.mark.parametrize("name", ["stem", "map", "plain-vit"])
def test_half_precision_is_written_in_fp32(name, tmp_path):
    """transformers computes in the dtype of the file, and a CPU does not compute in fp16."""
    shape = SHAPES.get(name, ViTConfig(**SMALL))
    weights = weights_of(shape)
    half = dataclasses.replace(weights, state={key: one.half() for key, one in weights.state.items()})
    write(half, tmp_path / "there", "hf")
    theirs = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "there", trust_remote_code=True)
    assert {one.dtype for one in theirs.parameters()} == {torch.float32}
    with torch.no_grad():
        assert theirs.eval()(images_of(shape)).logits.shape == (2, 3)


@pytest.mark.parametrize("name", ["stem", "rotary", "rope-mixed", "bit"])
def test_hidden_states_and_gradient_checkpointing(name, tmp_path):
    write(weights_of(SHAPES[name]), tmp_path / "there", "hf")
    theirs = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "there", trust_remote_code=True)
    images, labels = images_of(SHAPES[name]), torch.tensor([0, 2])
    found = theirs.eval()(images, labels=labels, output_hidden_states=True)
    assert len(found.hidden_states) == 3, "before the first of two blocks, and after each"
    assert torch.equal(theirs.classify(theirs.pool(found.hidden_states[-1])), found.logits)
    assert theirs(images).hidden_states is None
    assert torch.equal(theirs(images, return_dict=False)[0], found.logits)
    with pytest.raises(ValueError, match="no attentions"):
        theirs(images, output_attentions=True)

    def gradients() -> list[Tensor]:
        theirs.zero_grad()
        theirs(images, labels=labels).loss.backward()
        return [one.grad.clone() for one in theirs.parameters() if one.grad is not None]

    for part in theirs.modules():  # statistics of batch norms stay, and so do the gradients
        part.train(not isinstance(part, torch.nn.BatchNorm2d))
    passes = list[int]()
    first = theirs.stages[0] if name == "bit" else theirs.blocks[0]
    first.register_forward_pre_hook(lambda *_: passes.append(1))
    wanted = gradients()
    assert len(passes) == 1
    # transformers 5.23 has another name for it.
    enable = getattr(theirs, "activation_checkpointing_enable", theirs.gradient_checkpointing_enable)
    enable({"use_reentrant": False})
    for one, other in zip(gradients(), wanted, strict=True):
        torch.testing.assert_close(one, other)
    assert len(passes) == 3, "backward computes the block again"
