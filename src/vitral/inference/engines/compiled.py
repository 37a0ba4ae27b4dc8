"""torch.compile for inference: its requirements, its code cache, and a compiled network."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from vitral.errors import UsageError, VitralError
from vitral.folders import cache_folder
from vitral.inference.engines.casting import hooks_of

logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # without a GPU it warns of CUDA_HOME


def unavailable_reason(device: torch.device) -> str | None:
    """Missing requirement of torch.compile, as a sentence without its period; None if none is known."""
    keep_code()  # the search for a compiler makes torch fix its cache folder
    try:
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch.utils._triton import has_triton
    except ImportError:  # they are not public API
        return None
    try:
        get_cpp_compiler()
    except RuntimeError:
        return "torch.compile needs a C++ compiler, and there is none"
    if device.type == "cuda" and not has_triton():
        return "torch.compile needs Triton for GPUs, and it is not installed"
    return None


def keep_code() -> None:
    """Make torch cache compiled code in `vitral/compiled` of the user's cache, for the next run to reuse.

    Torch's default is the folder for temporary files. A folder set by the user (`TORCHINDUCTOR_CACHE_DIR`) has
    precedence.
    """
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder("compiled")))


@contextmanager
def reporting_compiler_errors(kind: type[VitralError], hint: str) -> Iterator[None]:
    """Raise failures of torch's compiler as errors of vitral."""
    try:
        yield
    except torch._dynamo.exc.TorchDynamoException as error:
        why = " ".join(str(error).split())[:300]
        raise kind("torch.compile failed on this network", why=why, hint=hint) from error


class Compiled(nn.Module):
    """A network compiled by torch.compile for inference.

    The first batch size is compiled on its own, the second one for all further sizes. On a CPU weights become constants
    that are packed once, so later changes of them have no effect. A call raises `UsageError` if the compiler fails.
    """

    def __init__(self, network: nn.Module):
        super().__init__()
        keep_code()
        self.frozen = next(network.parameters()).device.type == "cpu"
        # Compiled code is looked up by the identity of its parameters, so changed parameters must be other objects.
        self.network = torch.compile(copy.deepcopy(network, hooks_of(network)) if self.frozen else network)
        self.train(network.training)

    def forward(self, images: Tensor) -> Tensor:
        from torch._inductor import config  # imported here, since the compiler takes seconds to import

        frozen = config.patch(freezing=self.frozen)  # read when a batch size is compiled
        with reporting_compiler_errors(UsageError, "--engine auto"), frozen:
            return self.network(images)
