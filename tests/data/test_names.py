"""Names of files in any encoding of an archive, and in either form of Unicode."""

from __future__ import annotations

import io
import tarfile
import unicodedata
import zipfile
import zlib
from pathlib import Path

import pytest
from PIL import Image

import vitral
from images import MakeImages, noise
from running import printed
from vitral.data import load
from vitral.data.sources.lines import load_lines
from vitral.errors import DataError


def png(seed: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(noise(seed)).save(file, "PNG")
    return file.getvalue()


def packed(folder: Path, kind: str) -> Path:
    """An archive of the folder's content."""
    archive = folder.parent / f"photos.{kind}"
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    if kind == "zip":
        with zipfile.ZipFile(archive, "w") as zipped:
            for path in files:
                zipped.write(path, path.relative_to(folder))
    else:
        with tarfile.open(archive, "w:gz" if kind == "tar.gz" else "w") as tar:
            for path in files:
                tar.add(path, path.relative_to(folder))
    return archive


def unflagged(path: Path) -> Path:
    """The same zip without the flag of names in UTF-8, as a Mac and `zip` on Linux write it."""
    data = bytearray(path.read_bytes())
    for mark, at in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        i = data.find(mark)
        while i >= 0:
            flags = int.from_bytes(data[i + at : i + at + 2], "little") & ~0x800
            data[i + at : i + at + 2] = flags.to_bytes(2, "little")
            i = data.find(mark, i + 4)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_names_in_a_zip_are_utf_8_without_the_flag_too(form: str, make_images: MakeImages, tmp_path: Path) -> None:
    folder = make_images({unicodedata.normalize(form, name): 3 for name in ("rosé", "薔薇", "lys")})
    archive = unflagged(packed(folder, "zip"))
    flagged, plain = load(archive), load(folder)
    assert flagged.classes == plain.classes == ("lys", "rosé", "薔薇")
    assert names(flagged, archive) == names(plain, folder), "the same order"


def test_other_names_in_a_zip_are_of_code_page_437(tmp_path: Path) -> None:
    path = tmp_path / "old.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for i, name in enumerate(("n\u00fcsse", "lys")):
            archive.writestr(f"{name}/{i}.png", png(i))
    path.write_bytes(path.read_bytes().replace("n\u00fcsse".encode(), b"n\x81 sse"))
    assert load(unflagged(path)).classes == ("lys", "n\u00fc sse")


@pytest.mark.parametrize(("version", "classes"), [(1, ("éb", "éc")), (2, ("b", "c"))])
def test_the_extra_field_of_a_name_counts(version: int, classes: tuple[str, ...], tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "extra.zip", "w") as archive:
        for i, name in enumerate(("b", "c")):
            info = zipfile.ZipInfo(f"{name}/{i}.png")
            checksum = zlib.crc32(info.filename.encode()).to_bytes(4, "little")
            field = bytes([version]) + checksum + f"é{info.filename}".encode()
            info.extra = b"\x75\x70" + len(field).to_bytes(2, "little") + field
            archive.writestr(info, png(i))
    assert load(tmp_path / "extra.zip").classes == classes


def test_names_in_a_tar_are_utf_8_whatever_the_system_says(make_images: MakeImages, monkeypatch) -> None:
    archive = packed(make_images({"rosé": 2, "lys": 2}), "tar")
    monkeypatch.setattr(tarfile.TarFile, "encoding", "latin-1")
    assert load(archive).classes == ("lys", "rosé")


def names(dataset: vitral.DataSet, root: Path) -> list[str]:
    """Names below the root, composed."""
    return [unicodedata.normalize("NFC", name)[len(str(root)) + 1 :] for name in dataset["train"].names]


FORMS = [("NFC", "NFD"), ("NFD", "NFC")]


def images_of_names(folder: Path, names: list[str]) -> Path:
    for seed, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(seed))
    return folder


@pytest.mark.parametrize(("written", "there"), FORMS)
@pytest.mark.parametrize("kind", ["file", "without suffixes", "outside", "folder", "zip", "tar", "tar.gz"])
def test_names_of_a_table_are_found_in_either_form_of_unicode(
    kind: str, written: str, there: str, tmp_path: Path
) -> None:
    flat = kind in ("folder", "zip", "tar", "tar.gz")
    names = [f"{'' if flat else 'rosé/prés/'}été {i}.png" for i in range(4)]
    folder = images_of_names(tmp_path / "photos", [unicodedata.normalize(there, name) for name in names])
    if kind == "without suffixes":
        names = [name.removesuffix(".png") for name in names]
    table = (tmp_path / "tables" if kind == "outside" else folder) / "list.csv"
    table.parent.mkdir(exist_ok=True)
    rows = "".join(f"{'../photos/' if kind == 'outside' else ''}{name},{i % 2}\n" for i, name in enumerate(names))
    table.write_text(unicodedata.normalize(written, f"file,label\n{rows}"), "utf-8")
    dataset = load(folder if kind == "folder" else packed(folder, kind) if flat else table)
    assert [dataset["train"].image(i).shape for i in range(4)] == [noise(0).shape] * 4
    noted = any("names of the table are written in another form of Unicode" in note for note in dataset.notes)
    assert noted or kind == "without suffixes"


def test_a_name_in_both_forms_is_that_of_the_table(make_images: MakeImages) -> None:
    composed, decomposed = "\u00e9", "e\u0301"
    folder = make_images({composed: 1, decomposed: 1, "a": 1})
    for name in (composed, decomposed):
        (folder / "list.csv").write_text(f"file,label\na/0.png,a\n{name}/0.png,b\n", "utf-8")
        assert load(folder / "list.csv")["train"].names[1].endswith(f"{name}/0.png")
    (folder / "list.csv").write_text("file,label\na/0.png,a\n\u00ea/0.png,b\n", "utf-8")
    with pytest.raises(DataError, match="1 file of the table does not exist"):
        load(folder / "list.csv")


@pytest.mark.parametrize(("written", "there"), FORMS)
def test_lists_paths_and_texts_are_found_in_either_form(written: str, there: str, tmp_path: Path, capsys) -> None:
    name = "rosé/été.png"
    folder = images_of_names(tmp_path / "photos", [unicodedata.normalize(there, name)])
    listed = unicodedata.normalize(written, name)
    (folder / "list.txt").write_text(listed, "utf-8")
    (found,) = vitral.load("demo", device="cpu")(folder / "list.txt")
    assert found.name == str(folder / listed)
    shown = " ".join("".join(printed(capsys, "predict", "demo", str(folder / "list.txt"))).split())
    assert "is written in another form of Unicode than the files" in shown
    printed(capsys, "predict", "demo", str(folder / listed))
    assert (
        len(
            load(
                unicodedata.normalize(
                    written, str(images_of_names(tmp_path / unicodedata.normalize(there, "é"), ["a/1.png", "b/1.png"]))
                )
            )["train"]
        )
        == 2
    )
    (folder / unicodedata.normalize(there, "rosé") / unicodedata.normalize(written, "été.txt")).write_text("words")
    assert len(load_lines(folder)["train"]) == 1


def test_missing_names_of_a_list_are_errors(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("été.png", "utf-8")
    with pytest.raises(vitral.VitralError, match="no such file"):
        vitral.load("demo", device="cpu")(tmp_path / "list.txt")
