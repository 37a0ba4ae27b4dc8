"""Kinds of files that are no image that vitral reads, by their first bytes: their names, and a way out."""

from __future__ import annotations

import codecs

CONVERT = "convert it to JPEG or PNG"
LIKE_IMAGES = frozenset(
    (
        *(".jxl", ".jp2", ".j2k", ".jpx", ".psd", ".svg", ".eps", ".ico", ".tga", ".exr", ".hdr", ".dcm", ".dicom"),
        *(".dng", ".cr2", ".cr3", ".nef", ".arw", ".raf", ".orf", ".rw2", ".raw", ".fits", ".nii", ".pcx"),
    )
)
"""Extensions of images that are not read, in lower case: a data set that leaves some out is not whole."""

VIDEOS = frozenset(
    (".mp4", ".m4v", ".mov", ".avi", ".mkv", ".webm", ".wmv", ".flv", ".mpg", ".mpeg", ".3gp", ".ogv", ".mts")
)
"""Extensions of videos, in lower case."""

_KINDS: tuple[tuple[int, tuple[bytes, ...], str, str], ...] = (
    (0, (b"\xff\x0a", b"\0\0\0\x0cJXL "), "a JPEG XL image", CONVERT),
    (0, (b"\0\0\0\x0cjP  ", b"\xff\x4f\xff\x51"), "a JPEG 2000 image", CONVERT),
    (0, (b"8BPS",), "a Photoshop document", CONVERT),
    (0, (b"%PDF",), "a PDF document", "render its pages to PNG"),
    (0, (b"%!PS",), "a PostScript document", CONVERT),
    (0, (b"\x76\x2f\x31\x01",), "an OpenEXR image", "tone-map it, and save it as PNG"),
    (0, (b"#?RADIANCE", b"#?RGBE"), "a Radiance HDR image", "tone-map it, and save it as PNG"),
    (128, (b"DICM",), "a DICOM image", "apply its window, and save it as PNG"),
    (0, (b"SIMPLE  =",), "a FITS image", "scale it, and save it as PNG"),
    (0, (b"\0\0\1\0", b"\0\0\2\0"), "an icon", CONVERT),
    (0, (b"FUJIFILMCCD-RAW", b"IIRO", b"IIU\0"), "a raw image of a camera", "develop it to JPEG or PNG"),
    (0, (b"version https://git-lfs",), "a pointer of Git LFS", "git lfs pull fetches the image itself"),
    (0, (b"PK\3\4",), "a zip archive", "unpack it, or give it as DATA"),
    (0, (b"\x1f\x8b",), "a gzip archive", "unpack it"),
    (0, (b"\x1aE\xdf\xa3",), "a video (Matroska or WebM)", "extract its frames"),
    (4, (b"moov", b"mdat", b"wide\0"), "a video (QuickTime)", "extract its frames"),
    (0, (b"\x30\x26\xb2\x75",), "a video (Windows Media)", "extract its frames"),
    (0, (b"FLV\1",), "a video (Flash)", "extract its frames"),
    (0, (b"OggS",), "a video or a sound (Ogg)", "extract its frames"),
    (0, (b"\0\0\1\xba", b"\0\0\1\xb3"), "a video (MPEG)", "extract its frames"),
    (8, (b"AVI ",), "a video (AVI)", "extract its frames"),
    (8, (b"WAVE",), "a sound", "remove it"),
    (0, (b"#!",), "a script", "remove it"),
    (0, (b"\x7fELF",), "a program (ELF)", "remove it"),
)
_BRANDS = {
    b"heic": "HEIC",
    b"heix": "HEIC",
    b"heim": "HEIC",
    b"heis": "HEIC",
    b"hevc": "HEIC",
    b"hevx": "HEIC",
    b"mif1": "HEIC",
    b"msf1": "HEIC",
    b"avif": "AVIF",
    b"avis": "AVIF",
}
"""Brands of ISO media files (ISO/IEC 23008-12) that hold images."""


def media_brand(data: bytes) -> str:
    """Return "HEIC" or "AVIF" for an ISO media file with such images, "video" for another one, else ""."""
    if data[4:8] != b"ftyp":
        return ""
    size = min(int.from_bytes(data[:4], "big"), 256, len(data))
    compatible = [data[at : at + 4] for at in range(16, size - 3, 4)]
    found = [_BRANDS[brand] for brand in (data[8:12], *compatible) if brand in _BRANDS]
    return ("AVIF" if "AVIF" in found else found[0]) if found else "video"


def kind_of(data: bytes) -> tuple[str, str]:
    """Return the kind of a file by its first bytes ("" if it is unknown), and what to do with it."""
    if media_brand(data) == "video":
        return "a video (MP4)", "extract its frames"
    for at, marks, kind, hint in _KINDS:
        if any(data[at : at + len(mark)] == mark for mark in marks):
            return kind, hint
    start = data[:512].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if start.startswith((b"<!doctype html", b"<html", b"<head")):
        return "a web page", "the download failed: download the image again"
    if start.startswith(b"<svg") or (start.startswith(b"<?xml") and b"<svg" in start):
        return "an SVG drawing", "render it to PNG"
    if _is_text(data[:_SAMPLE]):
        return "a text file", "remove it, or download the image again"
    if data.startswith(b"MZ"):  # after texts, which may begin with these letters
        return "a program (Windows)", "remove it"
    return "", ""


_SAMPLE = 4096
_CONTROLS = frozenset(map(chr, (*range(32), 127))) - set("\t\n\r\f")


def _is_text(data: bytes) -> bool:
    """True for UTF-8 without control characters; the last character may be cut."""
    try:
        return _CONTROLS.isdisjoint(codecs.getincrementaldecoder("utf-8")().decode(data))
    except UnicodeDecodeError:
        return False
