"""The state of a server: its models with their reloading, the pool of decoders, and what is in flight."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from vitral.containers import cores
from vitral.data.files import file_numbers
from vitral.data.images.lazy_torchvision import torchvision
from vitral.errors import VitralError
from vitral.inference.predictor import Predictor
from vitral.serving.auth import Access
from vitral.serving.decoding import Decoder
from vitral.serving.limits import Limits, Places
from vitral.serving.logs import log
from vitral.serving.metrics import Metrics
from vitral.serving.models import Model, Reference, load_checked, model_of
from vitral.serving.problems import Problem
from vitral.weights.load import locate

T = TypeVar("T")

Stamp = tuple[int, ...] | None
"""Modification time, size and inode: one of them changes when a file is replaced."""


class Service:
    """Models by name, the first one being the default."""

    def __init__(
        self,
        sources: Mapping[str, Reference],
        access: Access,
        limits: Limits,
        options: Mapping[str, object] | None = None,
        example: bytes = b"",
        right: float | None = None,
    ):
        """Load every model; the errors of `vitral.load` are raised here. `options` are those of `vitral.load`. The page
        offers `example`, a PNG. With `right`, images are "not sure" so that this share of the other answers is correct.
        """
        torchvision()  # decodes JPEGs faster than Pillow, and takes seconds to import
        self.sources, self.access, self.limits, self.options = dict(sources), access, limits, dict(options or {})
        self.metrics, self.example, self.right = Metrics(), example, right
        self.decode = Decoder(cores(), limits, self.metrics)
        self._pool = ThreadPoolExecutor(4, thread_name_prefix="vitral-service")
        self.bodies = Places(limits.bodies, self._bodies_full)
        self.draining = False
        self.ended = False
        self.running = False
        self.watch_seconds = 2.0
        self._stamps = {name: _stamp(reference) for name, reference in self.sources.items()}
        self.models = {name: self._load(name) for name in self.sources}
        self.refused: dict[str, str] = {}
        """Models of which a newer version was refused → the time."""
        self._reloading = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def model(self, name: str | None) -> Model:
        """The model of this name, by default the first; `Problem` if there is none."""
        found = next(iter(self.models.values())) if name is None else self.models.get(name)
        if found is None:
            known = list(self.models)
            raise Problem("unknown-model", f"'{(name or '')[:64]}' is not served here", models=known)
        return found

    @property
    def ready(self) -> bool:
        """True while new requests are welcome."""
        return self.running and not self.draining

    def drain(self) -> None:
        """Let readiness go; requests are answered until the server ends."""
        self.draining = True
        self.metrics.draining.set(1)

    async def start(self) -> None:
        """Begin to answer, in the running event loop."""
        for model in self.models.values():
            model.start()
        self.running = True
        self._background(self._watch())

    async def stop(self) -> None:
        """End; nothing is in flight any more, or is given up."""
        self.running = False
        for task in list(self._tasks):
            task.cancel()
        for model in self.models.values():
            await model.stop()
        self.decode.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def run(self, work: Callable[..., T], *given: object) -> T:
        """The result of a function that would block the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *given)

    def hang_up(self) -> None:
        """Reload all models, as SIGHUP asks."""
        log("reloading all models")
        self.reload_all()

    def reload_all(self) -> None:
        """Reload all models in the background."""
        for name in self.models:
            self._background(self.reload(name))

    async def reload(self, name: str) -> None:
        """Reload a model; the old one answers until the new one has passed its self-test, and stays if it fails."""
        async with self._reloading:
            old = self.models[name]
            try:
                self._stamps[name] = _stamp(self.sources[name])
                new = await self.run(self._load, name)
            except Exception as error:  # whatever is wrong with the new one, the old one stays
                self.metrics.reloads.labels(name, "refused").inc()
                self.refused[name] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
                shortened = " ".join(str(error).split())[:500] or type(error).__name__
                log("a new version of a model was refused", logging.ERROR, model=name, why=shortened)
                return
            new.start()
            self.models[name] = new
            self.refused.pop(name, None)
            self.metrics.reloads.labels(name, "loaded").inc()
            log("reloaded a model", model=name, version=new.version, before=old.version)
            if old.labels != new.labels:
                self.metrics.model.remove(*old.labels)
        self._background(old.stop(when_idle=True))

    def _load(self, name: str) -> Model:
        predictor = load_checked(self.sources[name], self.options, self.right)
        return model_of(name, predictor, self.limits, self.metrics)

    async def _watch(self) -> None:
        """Reload a model when the file of its weights has changed and then stays as it is."""
        seen = dict(self._stamps)
        while True:
            await asyncio.sleep(self.watch_seconds)
            for name, reference in self.sources.items():
                now = await self.run(_stamp, reference)
                if now is not None and now == seen[name] != self._stamps[name]:
                    await self.reload(name)
                seen[name] = now

    def _background(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _bodies_full(self) -> Problem:
        detail = f"requests of {self.bodies.used:,} bytes are being answered"
        return Problem("queue-full", detail, headers={"Retry-After": "1"})


def _stamp(reference: Reference) -> Stamp:
    """The state of the file that the weights are in; None if there is none, or it never changes."""
    if isinstance(reference, Predictor) or not Path(reference).exists():
        return None
    try:
        status = os.stat(locate(reference)[0])
    except (OSError, VitralError):
        return None
    return file_numbers(status)
