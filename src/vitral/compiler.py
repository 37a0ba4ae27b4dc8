"""torch's compiler: whether this machine has what it needs, where its code is kept, and a network that it computes."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from vitral.errors import UsageError, VitralError
from vitral.folders import cache_folder

logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # without a GPU it warns of CUDA_HOME


def lacking(device: torch.device) -> str | None:
    """What compiling needs and this machine has not: a sentence without its full stop; None where nothing is known."""
    keep_code()  # looking for a compiler, torch settles where its code goes
    try:
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch.utils._triton import has_triton
    except ImportError:  # they are no promise of torch's
        return None
    try:
        get_cpp_compiler()
    except RuntimeError:
        return "torch.compile needs a C++ compiler, and there is none"
    if device.type == "cuda" and not has_triton():
        return "torch.compile needs Triton for GPUs, and it is not installed"
    return None


def keep_code() -> None:
    """Let torch keep compiled code in `vitral/compiled` of the user's cache, where the next run finds it; by itself it
    takes the folder for temporary files. A folder that the user set (`TORCHINDUCTOR_CACHE_DIR`) stays.
    """
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder("compiled")))


@contextmanager
def failures_told(kind: type[VitralError], hint: str) -> Iterator[None]:
    """What fails of torch's compiler is raised as an error of ours."""
    try:
        yield
    except torch._dynamo.exc.TorchDynamoException as error:
        why = " ".join(str(error).split())[:300]
        raise kind("torch.compile failed on this network", why=why, hint=hint) from error


class Compiled(nn.Module):
    """A network as torch's compiler computes it, for inference. The first batch size is compiled by itself, the second
    one for all that follow; on a CPU weights are constants that are laid out once, so that changes of them do not reach
    what is compiled. `UsageError` at a call where the compiler fails.
    """

    def __init__(self, network: nn.Module):
        super().__init__()
        keep_code()
        self.frozen = next(network.parameters()).device.type == "cpu"
        # Compiled code is found again by its parameters being the same objects: changed ones must be others.
        self.network: Any = torch.compile(copy.deepcopy(network) if self.frozen else network)
        self.train(network.training)

    def forward(self, images: Tensor) -> Tensor:
        from torch._inductor import config  # here: torch's compiler takes seconds to import

        frozen = config.patch(freezing=self.frozen)  # it is read when a batch size is compiled
        with failures_told(UsageError, "--engine auto"), frozen:
            return self.network(images)
