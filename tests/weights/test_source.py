"""Files and folders of weights: tensors read equal tensors written, and damaged files are refused."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import hostile
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from vitral.errors import WeightsError
from vitral.weights.read.source import LARGEST_JSON, non_finite, open_source, without_prefixes

TENSORS = {
    "patch_embed.proj.weight": torch.randn(4, 3, 2, 2),
    "half": torch.randn(3).bfloat16(),
    "flag": torch.tensor([True, False, True]),
    "count": torch.tensor(7),
    "double": torch.randn(2, 2, dtype=torch.float64),
    "empty": torch.zeros(0, 4),
}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """To the bit: the type, the shape and every byte."""
    return set(left) == set(right) and all(
        left[name].dtype == right[name].dtype
        and left[name].shape == right[name].shape
        and left[name].contiguous().reshape(-1).view(torch.uint8).equal(right[name].reshape(-1).view(torch.uint8))
        for name in left
    )


def test_safetensors(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path, metadata={"format": "pt", "x": "y"})
    source = open_source(path)
    assert same(source.tensors, TENSORS)
    assert dict(source.metadata) == {"format": "pt", "x": "y"}
    assert (source.config, source.preprocessor, source.notes) == (None, None, ())
    assert source.where == str(path)


def test_tensors_come_in_the_order_of_the_header(tmp_path):
    header = {name: hostile.entry(8 * i, 8 * i + 8, [2]) for i, name in enumerate(("z", "a", "m"))}
    path = hostile.safetensors(tmp_path / "x.safetensors", header, np.arange(6, dtype=np.float32).tobytes())
    source = open_source(path)
    assert list(source.tensors) == ["z", "a", "m"]
    assert source.tensors["m"].tolist() == [4, 5]


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="asks Linux for its memory")
def test_a_large_file_is_mapped_not_read(tmp_path):
    """320 MB, sparse on the disk: opening takes no memory, reading the pages read; writing into a tensor stays private.

    Counted are the pages of the file's own mapping: what libraries take meanwhile is not the file's.
    """
    size = 320 * 2**20
    header = {f"blocks.{i}.w": hostile.entry(i * size // 10, (i + 1) * size // 10, [size // 40]) for i in range(10)}
    path = hostile.safetensors(tmp_path / "big.safetensors", header)
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size + size)
    code = (
        "import re, sys; from pathlib import Path; import torch; from vitral.weights.read.source import *\n"
        "def resident():\n"  # MB of the file in memory, and of those the private copies
        "    parts = re.split(r'^(?=[0-9a-f]+-[0-9a-f]+ )', Path('/proc/self/smaps').read_text(), flags=re.M)\n"
        "    own = [part for part in parts if part.split('\\n')[0].endswith(sys.argv[1])]\n"
        "    return [sum(int(re.search(rf'^{key}: *(\\d+) kB', part, re.M)[1]) for part in own) / 1024\n"
        "            for key in ('Rss', 'Anonymous')]\n"
        "source = open_source(Path(sys.argv[1])); opened = resident()\n"
        "assert sum(t.numel() for t in source.tensors.values()) * 4 == 320 * 2**20\n"
        "source.tensors['blocks.0.w'].sum(); read = resident()\n"
        "source.tensors['blocks.1.w'].add_(1); written = resident()\n"
        "print(*opened, *read, *written)"
    )
    done = subprocess.run([sys.executable, "-c", code, path], check=True, capture_output=True, text=True)
    opened, opened_private, read, read_private, _, written_private = map(float, done.stdout.split())
    assert opened < 4
    assert 30 < read - opened < 34
    assert opened_private == read_private == 0, "reading a tensor takes pages of the file, no memory"
    assert 30 < written_private < 34, "a written tensor is a private copy"
    with open(path, "rb") as file:
        file.seek(-4, os.SEEK_END)
        assert file.read() == bytes(4)


def test_damaged_safetensors_are_refused(tmp_path):
    for said, path in hostile.damaged_safetensors(tmp_path).items():
        with pytest.raises(WeightsError, match=re.escape(said)) as caught:
            open_source(path)
        assert str(path) in str(caught.value)
        assert len(str(caught.value).splitlines()) <= 5


def test_every_cut_is_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file(TENSORS, path)
    whole = path.read_bytes()
    for cut in range(0, len(whole), 7):
        path.write_bytes(whole[:cut])
        with pytest.raises(WeightsError) as caught:
            open_source(path)
        assert f"{cut:,}" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "it is empty"),
        (b"<!DOCTYPE html><html>", "a web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "git lfs pull"),
        (b"\x89HDF\r\n\x1a\n" + bytes(40), "HDF5"),
        (b"cposix\nsystem\n(S'touch x'\ntR.", "begins with 63 70"),
    ],
)
@pytest.mark.parametrize("name", ["x.pth", "x.npz", "x.safetensors"])
def test_other_formats_are_recognized_by_their_first_bytes(tmp_path, content, said, name):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(WeightsError) as caught:
        open_source(tmp_path / name)
    assert said in str(caught.value) or (name == "x.safetensors" and "damaged safetensors" in str(caught.value))


def test_the_first_bytes_decide_not_the_name(tmp_path):
    save_file(TENSORS, tmp_path / "x.pth")
    assert same(open_source(tmp_path / "x.pth").tensors, TENSORS)
    np.savez(tmp_path / "y.npz", **{"Transformer/a": np.arange(3)})
    (tmp_path / "y.npz").rename(tmp_path / "y.bin")
    assert open_source(tmp_path / "y.bin").tensors["Transformer/a"].tolist() == [0, 1, 2]


def test_what_is_not_there(tmp_path):
    with pytest.raises(WeightsError, match="no such file"):
        open_source(tmp_path / "gone.pth")
    with pytest.raises(WeightsError, match="no weights in this folder"):
        open_source(tmp_path)
    os.mkfifo(tmp_path / "x.pth")
    with pytest.raises(WeightsError, match="not a regular file"):
        open_source(tmp_path / "x.pth")
    hostile.safetensors(tmp_path / "x.safetensors", {})
    with pytest.raises(WeightsError, match="no tensors"):
        open_source(tmp_path / "x.safetensors")


# ---- names


@pytest.mark.parametrize("kind", [torch.int8, torch.uint8, torch.int16])
def test_matrices_of_whole_numbers_are_refused(tmp_path, kind):
    """Without their scale they would be other weights."""
    matrix = torch.zeros(2, 2, dtype=kind)
    save_file({"a.weight": torch.zeros(2, 2), "b.weight": matrix, "c": torch.zeros(1, dtype=kind)}, tmp_path / "m.st")
    with pytest.raises(WeightsError, match="quantized weights are not read") as caught:
        open_source(tmp_path / "m.st")
    assert caught.value.why == f"b.weight is {str(kind).removeprefix('torch.')}"


def test_shared_prefixes_go_and_others_stay():
    one = torch.ones(1)
    names, notes = without_prefixes({"module._orig_mod.a.w": one, "module._orig_mod.model.b": one})
    assert list(names) == ["a.w", "model.b"]
    assert notes == ["prefix 'module.' removed from all names", "prefix '_orig_mod.' removed from all names"]
    for kept in (["encoder.ln.weight", "class_token"], ["model.a", "b"], ["module.", "module.a"], ["modules.a"]):
        assert list(without_prefixes(dict.fromkeys(kept, one))[0]) == kept


def test_the_prefix_is_noted(tmp_path):
    save_file({f"module.{name}": tensor for name, tensor in TENSORS.items()}, tmp_path / "x.safetensors")
    source = open_source(tmp_path / "x.safetensors")
    assert same(source.tensors, TENSORS)
    assert source.notes == ("prefix 'module.' removed from all names",)


# ---- folders


def hub(folder, **config):
    (folder / "config.json").write_text(json.dumps({"model_type": "vit", **config}))
    (folder / "preprocessor_config.json").write_text('{"size": 224}')


def test_a_folder_of_hugging_face(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"never opened")
    hub(tmp_path, auto_map={"AutoModel": "evil.Model"})
    source = open_source(tmp_path)
    assert same(source.tensors, TENSORS)
    assert source.config == {"model_type": "vit", "auto_map": {"AutoModel": "evil.Model"}}
    assert source.preprocessor == {"size": 224}
    assert open_source(tmp_path / "model.safetensors").config == source.config


def shards(folder, places):
    for shard in set(places.values()):
        held = {name: TENSORS[name] for name, where in places.items() if where == shard and name in TENSORS}
        if "/" not in shard:
            save_file(held, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def test_shards(tmp_path):
    places = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(TENSORS)}
    shards(tmp_path, places)
    source = open_source(tmp_path)
    assert same(source.tensors, TENSORS)
    assert list(source.tensors) == list(TENSORS)
    assert source.notes == ("2 shards",)


@pytest.mark.parametrize("outside", ["../secret.safetensors", "/etc/passwd", "a/../../x", "C:\\x", ""])
def test_an_index_that_points_outside(tmp_path, outside):
    inside = tmp_path / "in"
    inside.mkdir()
    save_file(TENSORS, tmp_path / "secret.safetensors")
    shards(inside, {"half": "model-0.safetensors"})
    (inside / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"half": outside}}))
    with pytest.raises(WeightsError, match="points outside its folder"):
        open_source(inside)


def test_an_inconsistent_index(tmp_path):
    shards(tmp_path, {"half": "model-0.safetensors", "gone": "model-0.safetensors"})
    with pytest.raises(WeightsError, match=r"is missing in a shard(.|\n)*'gone'"):
        open_source(tmp_path)
    shards(tmp_path, {"half": "model-0.safetensors", "flag": "model-0.safetensors"})
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"half": "model-0.safetensors"}}')
    with pytest.raises(WeightsError, match="does not list"):
        open_source(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": ["half"]}')
    with pytest.raises(WeightsError, match="no weight_map"):
        open_source(tmp_path)
    shards(tmp_path, {"half": "model-1.safetensors"})
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"no such file(.|\n)*model-1"):
        open_source(tmp_path)


def test_a_folder_with_one_file_of_any_name(tmp_path):
    np.savez(tmp_path / "B_16.npz", a=np.arange(3))
    assert list(open_source(tmp_path).tensors) == ["a"]
    save_file(TENSORS, tmp_path / "open_clip.safetensors")
    assert same(open_source(tmp_path).tensors, TENSORS)
    save_file(TENSORS, tmp_path / "second.safetensors")
    with pytest.raises(WeightsError, match="several files of weights"):
        open_source(tmp_path)


@pytest.mark.parametrize("text", ["[1]", "{", "[" * 100_000, '{"a": ' * 100_000, '"' + "x" * LARGEST_JSON + '"'])
def test_strange_configurations(tmp_path, text):
    save_file(TENSORS, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(WeightsError, match="cannot read a JSON file"):
        open_source(tmp_path)
    source = open_source(tmp_path / "model.safetensors")  # there it may be anybody's
    assert source.config is None
    assert "ignored config.json beside it" in source.notes[0]


def hostile_files(folder: Path) -> list[Path]:
    """Weights with very many tensors, with deep or endless metadata, and folders whose config is hostile."""
    many = {f"t{i}": hostile.entry(0, 0, [0]) for i in range(200_000)}
    deep = {"__metadata__": {"vitral": "[" * 2_000_000 + "]" * 2_000_000}, "a": hostile.entry(0, 4, [1])}
    long = {"__metadata__": {"vitral": "x" * 50_000_000}, "a": hostile.entry(0, 4, [1])}
    found = [
        hostile.safetensors(folder / f"{name}.safetensors", header, bytes(4))
        for name, header in (("many", many), ("deep", deep), ("long", long))
    ]
    nan = '{"model_type": "vit", "hidden_size": NaN, "num_attention_heads": NaN, "layer_norm_eps": Infinity}'
    for name, text in (("nan", nan), ("nested", '{"model_type": ' * 100_000), ("wide", '{"hidden_size": 1e999}')):
        (folder / name).mkdir()
        save_file({"embeddings.cls_token": torch.zeros(1, 1, 4)}, folder / name / "model.safetensors")
        (folder / name / "config.json").write_text(text)
        found.append(folder / name)
    return found


@pytest.mark.slow
def test_hostile_weights_are_refused_soon_and_in_little_memory(tmp_path):
    code = (
        "import resource, sys, time; from vitral.errors import VitralError; from vitral.weights.load import read\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024\n"
        "for path in sys.argv[1:]:\n"
        "    began, before = time.process_time(), peak()\n"
        "    try:\n"
        "        read(path); print('read')\n"
        "    except VitralError:\n"
        "        print(time.process_time() - began, peak() - before)"
    )
    files = hostile_files(tmp_path)
    done = subprocess.run([sys.executable, "-c", code, *files], check=True, capture_output=True, text=True)
    measured = [tuple(map(float, line.split())) for line in done.stdout.splitlines()]
    assert len(measured) == len(files)
    assert all(seconds < 5 and mebibytes < 1024 for seconds, mebibytes in measured), measured


# ---- numbers


def test_not_a_number_is_found_and_loads(tmp_path):
    tensors = {
        "good": torch.randn(5),
        "overflows": torch.full((1000,), 6e4, dtype=torch.float16),
        "large": torch.full((1000,), 3e38),
        "nan": torch.tensor([1.0, float("nan")]),
        "both": torch.tensor([float("inf"), float("-inf")]).bfloat16(),
        "double": torch.tensor([[0.0], [float("-inf")]], dtype=torch.float64),
        "eighth": torch.tensor([1.0, float("nan")]).to(torch.float8_e4m3fn),
        "whole": torch.arange(3),
        "none": torch.zeros(0),
    }
    save_file(tensors, tmp_path / "x.safetensors")
    source = open_source(tmp_path / "x.safetensors")
    assert same(source.tensors, tensors)
    assert sorted(non_finite(source.tensors)) == ["both", "double", "eighth", "nan"]
