"""Bounds of a server, and the places that requests take while they are answered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from vitral.data.images.decode import MAX_BYTES, MAX_PIXELS
from vitral.errors import UsageError
from vitral.serving.problems import Problem


@dataclass(frozen=True)
class Limits:
    """Bounds of one request, and of all of them together."""

    body: int = 32 << 20
    """Bytes of a request's body."""
    bodies: int = 256 << 20
    """Bytes of the bodies of all requests that are being read or answered."""
    headers: int = 16 << 10
    """Bytes of a request's header."""
    images: int = 32
    """Images of a request."""
    pixels: int = 50_000_000
    """Pixels of an image, before it is resized."""
    decode_seconds: float = 10.0
    """Time to decode one image."""
    timeout: float = 30.0
    """Seconds from a request's header to its answer; a request may ask for fewer."""
    queue: int = 256
    """Images that a model has accepted and not yet answered."""
    batch_size: int = 16
    """Images computed together."""
    batch_wait: float = 0.002
    """Seconds that an image waits for others that are being decoded, to share its batch."""
    explained: int = 4
    """Images of a request that are explained."""
    passes: int = 128
    """Forward passes that explaining one image may cost."""

    def __post_init__(self) -> None:
        positive = ("body", "bodies", "headers", "images", "pixels", "decode_seconds", "timeout", "queue", "batch_size")
        if bad := next((name for name in positive if not getattr(self, name) > 0), None):
            raise UsageError(f"the limit {bad} must be above 0")
        if not 0 <= self.batch_wait <= 1:
            raise UsageError("an image waits for others between 0 and 1 seconds")
        if self.body > MAX_BYTES or self.pixels > MAX_PIXELS:
            why = f"decoding reads at most {MAX_BYTES:,} bytes and {MAX_PIXELS:,} pixels"
            raise UsageError("a limit is above that of decoding", why=why)
        if self.images > self.queue or self.body > self.bodies:
            raise UsageError("one request may not be larger than all of them together", hint="--queue, --max-images")


class Places:
    """A number of places, taken within a `with` block. Entering raises `Problem` if there are not enough."""

    def __init__(
        self, capacity: int, refusal: Callable[[], Problem], changed: Callable[[int], None] = lambda count: None
    ):
        """`changed` is called with the places that are taken, and with minus as many when they are given back."""
        self.capacity, self.refusal, self.changed = capacity, refusal, changed
        self.used = 0

    @contextmanager
    def taken(self, count: int) -> Iterator[None]:
        """Hold `count` places; raise the refusal if they are not free."""
        if self.used + count > self.capacity:
            raise self.refusal()
        self.used += count
        self.changed(count)
        try:
            yield
        finally:
            self.used -= count
            self.changed(-count)
