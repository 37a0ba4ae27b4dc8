"""CUDA graphs: what a GPU was asked for once is asked for again at once, with no Python between two kernels.

A network of small layers leaves a GPU idle while Python names the next kernel. What is recorded reads and writes the
same places of memory each time: what changes from call to call is copied to where the recording reads it, and what it
gives is copied away before the next call.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vitral.errors import UsageError

Inputs = Sequence[Tensor | None]
Record = Callable[[Callable[[], Any]], tuple[Callable[[], None], Any]]
"""What records a program: it gives what does the same again, and the program's results, which that writes anew."""


class Aside:
    """A stream beside the one that is in use. What is to be recorded is done there first, some times: it may load
    kernels and choose among them, and a graph of gradients remembers its stream.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pool: Any = None

    @contextmanager
    def there(self) -> Iterator[None]:
        """Within, the device is asked by this stream; it begins after what was asked before, and ends before the
        rest.
        """
        if self._stream is None:
            yield
            return
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    def hand_out(self, tensor: Tensor) -> Tensor:
        """A tensor that was made there, to whoever uses another stream: its memory is not taken before that is done."""
        if self._stream is not None:
            tensor.record_stream(torch.cuda.current_stream(self.device))
        return tensor

    def record(self, program: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """A `Record`: nothing is computed yet. Recordings share their memory: one is done after the other."""
        graph = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        # "thread_local": threads that bring pictures may take pinned memory meanwhile
        mode = {"pool": self._pool, "stream": self._stream, "capture_error_mode": "thread_local"}
        with _recording, torch.cuda.graph(graph, **mode):
            results = program()
        return graph.replay, results


_recording = threading.Lock()
"""One at a time in a process: another one's beginning would wait for the device, which a recording cannot bear."""


@dataclass(frozen=True)
class Recording:
    """A program that was recorded, with the tensors that it reads and those that it writes."""

    inputs: Inputs
    results: Any
    again: Callable[[], None]

    @classmethod
    def of(cls, program: Callable[..., Any], inputs: Inputs, record: Record) -> Recording:
        """Record `program(*inputs)`."""
        held = [None if tensor is None else tensor.clone() for tensor in inputs]
        again, results = record(lambda: program(*held))
        return cls(held, results, again)

    def __call__(self, inputs: Inputs) -> Any:
        """What the program gives of other inputs of the same shapes; the next call overwrites it."""
        for held, new in zip(self.inputs, inputs, strict=True):
            if held is not None and new is not None:
                held.copy_(new)
        self.again()
        return self.results


def kinds_of(inputs: Inputs) -> tuple[Any, ...]:
    """What a recording is for: shapes and types."""
    return tuple(None if tensor is None else (tensor.shape, tensor.dtype) for tensor in inputs)


FEW = 32
"""Pictures up to which kernels are so short that asking for them takes longer."""
MOST = 8
"""Numbers of pictures that are recorded: each holds memory."""
_CALLS = 2
"""Calls of each that are computed as always."""


class Graphed(nn.Module):
    """A network for predictions, called from any thread: of few pictures its kernels are recorded, once for each number
    of them, since a GPU is done with one before Python has named the next. The same bits. Where its weights are other
    tensors, another one is needed.
    """

    def __init__(self, network: nn.Module, record: Record | None = None):
        super().__init__()
        self.network = network
        self._aside = Aside(next(network.parameters()).device)
        self._record = record or self._aside.record
        self._calls: Counter[Any] = Counter()
        self._recordings: dict[Any, Recording | None] = {}
        self._turn = threading.Lock()  # a recording has one place for its pictures
        self.train(network.training)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, K); to be called in inference mode."""
        if len(images) > FEW:
            return self.network(images)
        with self._turn:
            recording = self._recording(images)
            with self._aside.there():  # whichever stream a thread has, one after the other
                logits = recording([images]).clone() if recording else self.network(images)
            return self._aside.hand_out(logits)

    def _recording(self, images: Tensor) -> Recording | None:
        """What there is for so many pictures, once they were seen some times; `UsageError` where it cannot be."""
        kind = kinds_of([images])
        self._calls[kind] += 1
        if self._calls[kind] > _CALLS and kind not in self._recordings and len(self._recordings) < MOST:
            try:
                self._recordings[kind] = Recording.of(self.network, [images], self._record)
            except torch.OutOfMemoryError:  # computed as always
                self._recordings[kind] = None
            except RuntimeError as error:  # torch's memory and random numbers are not to be trusted any more
                why = " ".join(str(error).split())[:200]
                raise UsageError("this network cannot be recorded", why=why, hint="--engine plain") from error
        return self._recordings.get(kind)
