"""Fetch published weights by huggingface_hub: `timm:NAME` and `hf:ORG/NAME`, with an optional `@REVISION`.

Files are kept in huggingface_hub's own cache (`HF_HOME`, `HF_HUB_CACHE`), shared with every program that uses it. The
commit is returned, so that a run can be repeated with the same weights. Offline, or with `HF_HUB_OFFLINE` set, the
cached copy is used. Only weights and JSON are fetched, never code.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from vitral import bounded
from vitral.errors import UsageError, VitralError, WeightsError, nearest
from vitral.weights.read.references import BUILT_IN

CONFIGS = ("config.json", "preprocessor_config.json", "generation_config.json")
EXAMPLE = "timm:vit_small_patch16_224.augreg_in21k_ft_in1k or hf:google/vit-base-patch16-224"

_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_REFERENCE = re.compile(
    rf"(?:timm:(?P<timm>{_PART})|hf:(?P<hf>{_PART}/{_PART}))(?:@(?P<revision>[A-Za-z0-9][\w./-]*))?"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHARD = {".safetensors": "model", ".bin": "pytorch_model"}  # in the order of preference
_FETCHERS = ("huggingface_hub", "hf_xet", "httpx", "httpx2", "httpcore", "requests", "urllib3")
_TIMEOUT = 10.0  # seconds
_TRIAL = 1 << 20
"""Bytes of the weights by which the rate of a hub is measured."""
T = TypeVar("T")


@dataclass(frozen=True)
class Fetched:
    """A published network on this machine."""

    path: Path
    """Folder with the weights (whole or in shards), `config.json` and `preprocessor_config.json`."""
    reference: str
    """Pinned to the commit, so that the same weights can be fetched again: `timm:NAME@COMMIT`."""
    revision: str
    """The commit, 40 hexadecimal digits."""
    note: str = field(default="", compare=False)
    """Why a copy was not compared with the hub."""


def is_reference(text: str) -> bool:
    """True if `text` names a model on a hub, not a path."""
    return text.startswith(("timm:", "hf:"))


def parse(reference: str) -> tuple[str, str | None]:
    """Split a reference into repository (`ORG/NAME`) and revision; `UsageError` if malformed."""
    found = _REFERENCE.fullmatch(reference)
    if found is None or ".." in reference or "--" in reference or "//" in reference:
        raise UsageError(f"not the name of a model on a hub: '{reference}'", hint=EXAMPLE)
    return found["hf"] or f"timm/{found['timm']}", found["revision"]


def resolve(reference: str, *, cache_dir: str | Path | None = None) -> Fetched:
    """Fetch the model of a reference, or find it in the cache.

    A name is checked against the hub each time, and only changed files are fetched; a cached commit needs no
    connection. A copy in the cache is also used if the hub does not answer or refuses: `Fetched.note` says so.
    `cache_dir` replaces huggingface_hub's own. safetensors are preferred; `pytorch_model.bin` or a `.npz` are fetched
    only where there are none.

    Raises `UsageError` for a malformed reference, and `WeightsError` for a missing repository, a gated one, a missing
    revision, a repository without weights, and a hub that cannot be reached while nothing is cached: the last one names
    the files to put into a folder by hand.
    """
    repository, revision = parse(reference)
    if revision and _COMMIT.fullmatch(revision) and (folder := _cached(repository, revision, cache_dir)):
        return _fetched(reference, folder)
    try:
        return _fetched(reference, _download(repository, revision, cache_dir))
    except VitralError:
        raise
    except Exception as error:  # huggingface_hub changed its HTTP library three times, each with its own errors
        if not is_network_error(error):
            raise
        if found := cached(reference, cache_dir=cache_dir):
            return replace(found, note=_not_asked(error))
        _raise_hub_error(error, reference, repository, revision)
        copies = _copies(repository, cache_dir) if revision is None else []
        raise _not_reached(error, reference, repository, [folder.name for folder in copies]) from error


def cached(reference: str, *, cache_dir: str | Path | None = None) -> Fetched | None:
    """Return the copy in the cache without asking the hub; None if there is none, or several of unknown age."""
    repository, revision = parse(reference)
    if not (copies := _copies(repository, cache_dir)):
        return None
    if folder := _cached(repository, revision, cache_dir):
        return _fetched(reference, folder)
    return _fetched(reference, copies[0]) if revision is None and len(copies) == 1 else None


@dataclass(frozen=True)
class Offer:
    """Size of the weights on a hub, and the rate at which it sends their first bytes."""

    size: int
    """Bytes of the weights."""
    rate: float
    """Bytes per second."""

    @property
    def seconds(self) -> float:
        """Time of the download at the measured rate."""
        return self.size / self.rate


def is_offline() -> bool:
    """True if the user excluded the hub with `HF_HUB_OFFLINE`."""
    from huggingface_hub import constants

    return constants.HF_HUB_OFFLINE


def offered(reference: str, seconds: float) -> Offer | None:
    """Return the size of the weights and the rate of the hub; None if it does not tell both within `seconds`.

    Nothing that a resolver, a proxy or the hub does takes longer or raises an error.
    """
    if is_offline():
        return None
    return _within(seconds, lambda: _offer(reference, seconds))


def fetched_within(reference: str, seconds: float) -> Fetched | None:
    """Return what `resolve` does; None if it fails or takes longer than `seconds`."""
    return _within(seconds, lambda: resolve(reference))


def _within(seconds: float, program: Callable[[], T]) -> T | None:
    """Return what `program` returns; None if it fails or takes longer. Nothing can stop a connection that hangs, so it
    is left to a thread that ends with the process.
    """
    found: list[T] = []

    def run() -> None:
        with suppress(Exception):  # what went wrong does not matter
            found.append(program())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None


def _offer(reference: str, seconds: float) -> Offer:
    from huggingface_hub import HfApi, hf_hub_url
    from huggingface_hub.utils import build_hf_headers, get_session  # type: ignore[attr-defined]

    repository, revision = parse(reference)
    info = HfApi().model_info(repository, revision=revision, timeout=seconds)
    weights = _choose(file.rfilename for file in info.siblings or ())
    began = time.perf_counter()
    url = hf_hub_url(repository, weights[-1], revision=info.sha)
    headers = {**build_hf_headers(), "Range": f"bytes=0-{_TRIAL - 1}", "Accept-Encoding": "identity"}
    answer = get_session().get(url, headers=headers, timeout=seconds)
    answer.raise_for_status()
    received = len(answer.content)
    whole = answer.headers.get("Content-Range", "").rpartition("/")[2]  # "bytes 0-1048575/23046776"
    return Offer(int(whole or received), received / (time.perf_counter() - began))


def _fetched(reference: str, folder: Path) -> Fetched:
    return Fetched(folder, f"{reference.split('@')[0]}@{folder.name}", folder.name)


def _download(repository: str, revision: str | None, cache_dir: str | Path | None) -> Path:
    from huggingface_hub import HfApi, snapshot_download

    info = HfApi().model_info(repository, revision=revision, timeout=_TIMEOUT)
    names = [file.rfilename for file in info.siblings or ()]
    weights = _choose(names)
    if not weights:
        raise _no_weights(repository, names)
    wanted = [*weights, *(name for name in CONFIGS if name in names)]
    # By name, not by commit, so that the cache can resolve the name offline.
    return Path(snapshot_download(repository, revision=revision, cache_dir=cache_dir, allow_patterns=wanted))


def _choose(names: Iterable[str]) -> list[str]:
    """Choose the weights among a repository's files: whole, else in shards; safetensors before pickles before npz."""
    names = sorted(name for name in names if "/" not in name)
    for ending, stem in _SHARD.items():
        if f"{stem}{ending}" in names:
            return [f"{stem}{ending}"]
        index = f"{stem}{ending}.index.json"
        shards = [name for name in names if re.fullmatch(rf"{stem}-\d{{5}}-of-\d{{5}}{re.escape(ending)}", name)]
        if index in names and shards:
            return [index, *shards]
    arrays = [name for name in names if name.endswith(".npz")]
    return arrays if len(arrays) == 1 else []


def _cached(repository: str, revision: str | None, cache_dir: str | Path | None) -> Path | None:
    """Folder of a complete copy in the cache, else None."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        # Recent releases check that every file of the repository is cached, which it never is: ask for this one alone.
        found = snapshot_download(
            repository, revision=revision, cache_dir=cache_dir, local_files_only=True, allow_patterns=CONFIGS[0]
        )
    except (LocalEntryNotFoundError, OSError, ValueError):
        return None
    folder = Path(found)
    return folder if _complete(folder) else None


def _copies(repository: str, cache_dir: str | Path | None) -> list[Path]:
    """Complete copies of any commit. A cache that was copied without its `refs` does not tell which one is newest."""
    from huggingface_hub import constants

    place = Path(cache_dir or constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}" / "snapshots"
    return [folder for folder in sorted(place.glob("*")) if _COMMIT.fullmatch(folder.name) and _complete(folder)]


def _complete(folder: Path) -> bool:
    """True if all weights of a cached folder are there: an interrupted download leaves some out."""
    weights = _choose(path.name for path in folder.iterdir() if path.exists())
    if not weights or not weights[0].endswith(".index.json"):
        return bool(weights)
    try:
        needed = set(bounded.read(folder / weights[0])["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return needed <= set(weights)


# ---------------------------------------------------------------- what can go wrong


def is_network_error(error: Exception) -> bool:
    """True if the download failed; any other error is a bug in vitral and keeps its traceback."""
    library = type(error).__module__.split(".")[0]
    # hf_xet, which downloads large files, raises only RuntimeError; a page of a proxy is no JSON.
    return isinstance(error, OSError | RuntimeError | json.JSONDecodeError) or library in _FETCHERS


def _not_asked(error: Exception) -> str:
    if is_offline():
        return "HF_HUB_OFFLINE is set: the copy in the cache is used"
    status = getattr(getattr(error, "response", None), "status_code", None)
    how = f"the hub refused ({status})" if status else "the hub could not be asked"
    return f"{how}: the copy in the cache is used, which may be an older one"


def _raise_hub_error(error: Exception, reference: str, repository: str, revision: str | None) -> None:
    """Raise the `WeightsError` for an error reported by the hub; return if `error` is no such report."""
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    page = f"https://huggingface.co/{repository}"
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, GatedRepoError) or (isinstance(error, HfHubHTTPError) and status == 403):
        why = "its owners require accepted terms, or no access token was given"
        hint = f"accept the terms at {page}, then: hf auth login"
        raise WeightsError("access to this model is restricted", where=reference, why=why, hint=hint) from error
    if isinstance(error, RevisionNotFoundError):
        why = f"{repository} has no branch, tag or commit '{revision}'"
        hint = f"{reference.split('@')[0]}, or a revision of {page}/commits/main"
        raise WeightsError("no such revision", where=reference, why=why, hint=hint) from error
    if isinstance(error, RepositoryNotFoundError):
        near = _nearest(repository)
        why = f"nearest: {', '.join(near)}" if near else "it does not exist, or is private and no token was given"
        raise WeightsError("no such model on the hub", where=reference, why=why, hint=EXAMPLE) from error
    if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
        hint = f"look at {page}/tree/main"
        raise WeightsError("a file listed by the hub is missing", where=reference, hint=hint) from error


def _nearest(repository: str) -> list[str]:
    """Find up to three similar names of the same owner; none if the hub does not answer."""
    from huggingface_hub import HfApi

    owner, name = repository.split("/")
    with suppress(Exception):  # help for an error must not become another one
        found = [model.id for model in HfApi().list_models(author=owner, search=name.split(".")[0], limit=100)]
        near = nearest(repository, found, least=0.5)
        return [f"timm:{full.split('/')[1]}" if owner == "timm" else f"hf:{full}" for full in near]
    return []


def _no_weights(repository: str, names: list[str]) -> WeightsError:
    own = [name for name in names if not name.startswith(".")]
    listed = ", ".join(own[:6]) + (" …" if len(own) > 6 else "")
    what = "the repository has no readable weights"
    why = f"it has {listed or 'no files'}; needed is model.safetensors, pytorch_model.bin or one .npz"
    hint = "download the file with the weights and give its path"
    return WeightsError(what, where=f"https://huggingface.co/{repository}", why=why, hint=hint)


def _not_reached(error: Exception, reference: str, repository: str, commits: Sequence[str]) -> WeightsError:
    reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    offline = "HF_HUB_OFFLINE is set" if is_offline() else f"the hub cannot be reached ({reason[:120]})"
    if commits:
        pinned = " or ".join(f"{reference}@{commit}" for commit in commits)
        why = f"{offline}, and the cache does not tell which is the newest"
        return WeightsError(f"{len(commits)} copies of {repository}", where=reference, why=why, hint=pinned)
    what = f"could not fetch model.safetensors and config.json of {repository}"
    hint = f"download the files into a folder and type its path, or use a built-in model: {' or '.join(BUILT_IN)}"
    return WeightsError(what, where=reference, why=f"{offline}, and there is no complete copy in the cache", hint=hint)
