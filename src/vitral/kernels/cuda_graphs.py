"""Capture and replay CUDA graphs, which launch all kernels of a program without Python in between.

With small layers a GPU idles while Python launches the next kernel. A graph reads and writes the same memory in each
replay. So inputs are copied to its static tensors, and outputs are copied away before the next replay.
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
Capture = Callable[[Callable[[], Any]], tuple[Callable[[], None], Any]]
"""Captures a program. Returns a function that replays it, and its results, which each replay overwrites."""


class SideStream:
    """Side stream for warm-up and capture.

    Programs run on it a few times before capture: they may load and select kernels, and autograd remembers the stream.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pool: Any = None

    @contextmanager
    def active(self) -> Iterator[None]:
        """Run the body on the side stream, after earlier and before later work of the current stream."""
        if self._stream is None:
            yield
            return
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    def release(self, tensor: Tensor) -> Tensor:
        """Tell the allocator that the current stream uses a tensor of the side stream, so that its memory is kept."""
        if self._stream is not None:
            tensor.record_stream(torch.cuda.current_stream(self.device))
        return tensor

    def record(self, program: Callable[[], object]) -> tuple[Callable[[], None], Any]:
        """Capture without computing, as a `Capture`. Graphs share a memory pool, so replays must not overlap."""
        graph = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        # "thread_local": loader threads may allocate pinned memory meanwhile
        pool, stream = self._pool, self._stream
        with _capture_lock, torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            results = program()
        return graph.replay, results


_capture_lock = threading.Lock()
"""One capture at a time in a process: the start of another would synchronize the device, which breaks a capture."""


@dataclass(frozen=True)
class CapturedGraph:
    """A captured program with its static inputs and outputs."""

    inputs: Inputs
    results: Any
    replay: Callable[[], None]

    @classmethod
    def of(cls, program: Callable[..., object], inputs: Inputs, record: Capture) -> CapturedGraph:
        """Capture `program(*inputs)`."""
        static = [None if tensor is None else tensor.clone() for tensor in inputs]
        replay, results = record(lambda: program(*static))
        return cls(static, results, replay)

    def __call__(self, inputs: Inputs) -> Any:
        """Replay with other inputs of the same shapes. The next call overwrites the results."""
        for static, new in zip(self.inputs, inputs, strict=True):
            if static is not None and new is not None:
                static.copy_(new)
        self.replay()
        return self.results


def signature_of(inputs: Inputs) -> tuple[Any, ...]:
    """Key of a graph: shapes and dtypes of its inputs."""
    return tuple(None if tensor is None else (tensor.shape, tensor.dtype) for tensor in inputs)


MAX_BATCH = 32
"""Largest batch that is captured. In larger ones kernels run longer than their launch."""
MAX_GRAPHS = 8
"""Largest number of captured batch sizes, since each holds memory."""
_WARMUP_CALLS = 2
"""Eager calls of a batch size before its capture."""


class Graphed(nn.Module):
    """A network for prediction that captures one CUDA graph for each small batch size.

    Results are bitwise equal. It may be called from any thread. After its weights are replaced by other tensors, create
    a new one.
    """

    def __init__(self, network: nn.Module, record: Capture | None = None):
        super().__init__()
        self.network = network
        self._side_stream = SideStream(next(network.parameters()).device)
        self._record = record or self._side_stream.record
        self._calls: Counter[object] = Counter()
        self._graphs: dict[object, CapturedGraph | None] = {}
        self._lock = threading.Lock()  # a graph has one static input
        self.train(network.training)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, K). Call it in inference mode."""
        if len(images) > MAX_BATCH:
            return self.network(images)
        with self._lock:
            graph = self._graph(images)
            with self._side_stream.active():  # serializes calls from streams of different threads
                logits = graph([images]).clone() if graph else self.network(images)
            return self._side_stream.release(logits)

    def _graph(self, images: Tensor) -> CapturedGraph | None:
        """Graph for the shape of `images`, captured after the warm-up calls; `UsageError` if capture fails."""
        key = signature_of([images])
        self._calls[key] += 1
        if self._calls[key] > _WARMUP_CALLS and key not in self._graphs and len(self._graphs) < MAX_GRAPHS:
            try:
                self._graphs[key] = CapturedGraph.of(self.network, [images], self._record)
            except torch.OutOfMemoryError:  # stays eager
                self._graphs[key] = None
            except RuntimeError as error:  # the state of torch's allocator and generators is undefined now
                why = " ".join(str(error).split())[:200]
                hint = "--engine plain"
                raise UsageError("this network cannot be captured as a CUDA graph", why=why, hint=hint) from error
        return self._graphs.get(key)
