"""OpenVINO in the place of torch: a network compiled for this processor, for `Predictor(engine="openvino")`.

The network is traced in fp32 with a batch of any size, and OpenVINO's plugin for processors compiles it: in bf16 where
the machine computes in it, with as many threads as torch has. What was compiled is kept in the user's cache
(`vitral/openvino`), under a key of everything that it follows from. OpenVINO is an extra, `vitral[openvino]`.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import json
import os
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextvars import ContextVar
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vitral.device import Machine
from vitral.errors import MissingExtraError, UsageError, VitralError
from vitral.folders import cache_folder
from vitral.model import Network, quantized
from vitral.model.kinds import config_to_json
from vitral.model.quantized import Ranges, rounded
from vitral.weights.files import replacing

FORMAT = 1
"""Of what is kept; another number makes all of it be compiled anew."""
_KEPT = 8  # compiled networks in the cache: each is as large as its weights


class Compiled(nn.Module):
    """A network by OpenVINO: images (B, C, H, W), standardised, to logits (B, K) fp32."""

    def __init__(self, model: Any, note: str):
        super().__init__()
        self.note = note
        """What was done to make it, and how long it took."""
        self._request = model.create_infer_request()
        self._turn = threading.Lock()  # a request computes one batch at a time

    def forward(self, images: Tensor) -> Tensor:
        pixels = np.ascontiguousarray(images.float().numpy())
        with self._turn:
            (logits,) = self._request.infer([pixels]).values()
            return torch.from_numpy(logits.copy())  # the next batch is written to the same place


def compiled(network: Network, machine: Machine, ranges: Ranges | None = None) -> Compiled:
    """The network as OpenVINO computes it, from the cache where it lies there; `ranges` make its dense layers integers.

    Raises `MissingExtraError` where OpenVINO is not installed, and `UsageError` for a GPU, and for integers in what is
    no ViT or on a processor that gets them wrong.
    """
    if machine.device.type != "cpu":
        raise UsageError(f"OpenVINO computes on a processor here, not on {machine.device}", hint="--device cpu")
    if ranges is not None and (why := refusal(network)):
        raise UsageError(why, hint="--precision auto")
    started = time.perf_counter()
    ov = package()
    core = _core()
    settings = _settings(core, machine)
    file = cache_folder("openvino") / f"{_key(ov, core, network, settings, ranges)}.blob"
    model, done = None if _anew.get() else _read(core, file, settings), f"read from {file.parent}"
    if model is None:
        model, done = core.compile_model(_converted(network, ranges), "CPU", settings), "compiled"
        if not _anew.get():
            done += f" and kept in {file.parent}" if _keep(file, model) else f"; cannot write to {file.parent}"
    precision = "int8" if ranges is not None else settings["INFERENCE_PRECISION_HINT"]
    seconds = time.perf_counter() - started
    return Compiled(model, f"OpenVINO {_version(ov)}, {precision}, {done} in {seconds:.1f} s")


_anew: ContextVar[bool] = ContextVar("anew", default=False)


@contextlib.contextmanager
def anew() -> Iterator[None]:
    """Within, networks are compiled whatever the user's cache has, and it stays as it is."""
    token = _anew.set(True)
    try:
        yield
    finally:
        _anew.reset(token)


def installed() -> bool:
    """Whether OpenVINO is there, without importing it."""
    return find_spec("openvino") is not None


def refusal(network: nn.Module) -> str:
    """Why it cannot compute this network in integers here; empty where it can. `MissingExtraError` without OpenVINO."""
    return quantized.refusal(network, lacking)


@cache
def lacking() -> str:
    """Why its integers are of no use here; empty where they are right. By a trial of a tenth of a second, since it
    offers integers on every processor. `MissingExtraError` without OpenVINO.
    """
    layer, x = quantized.probe()
    with torch.autocast("cpu", enabled=False):  # whoever asks may be under one
        wanted = layer(x).numpy()
        try:
            model = _core().compile_model(_traced(layer, x), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
            (found,) = model.create_infer_request().infer([x.numpy()]).values()
        except RuntimeError as error:
            return f"OpenVINO cannot compile integers: {' '.join(str(error).split())[:200]}"
    return "" if np.allclose(found, wanted, atol=0.05) else quantized.WRONG


def package() -> Any:
    """OpenVINO, imported without its telemetry, which else reports to its makers that it was imported.

    Raises `MissingExtraError` where it is not installed.
    """
    try:
        if "openvino" in sys.modules or "openvino_telemetry" in sys.modules:
            import openvino
        else:
            sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]  # how Python marks what is not there
            try:
                import openvino
            finally:
                del sys.modules["openvino_telemetry"]
    except ImportError as error:
        hint = "pip install 'vitral[openvino]'"
        raise MissingExtraError("OpenVINO is not installed", why=str(error), hint=hint) from error
    return openvino


@cache
def _core() -> Any:
    """What OpenVINO does everything by: one for the process, and never ended.

    A core gives the thread that makes it another stack for signals, and takes it away at its end. Where two end in the
    order in which they were made, or one in another thread, that thread is left with a stack that is gone, and the next
    signal (a worker of a loader has ended) is a segmentation fault.
    """
    return package().Core()


def _version(ov: Any) -> str:
    return str(ov.__version__).partition("-")[0]


def _settings(core: Any, machine: Machine) -> dict[str, Any]:
    """One batch at a time, on all of torch's threads, which the system may move to the cores that are free."""
    half = machine.precision == "bf16" and "BF16" in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return {
        "INFERENCE_PRECISION_HINT": "bf16" if half else "f32",
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
        "ENABLE_CPU_PINNING": False,
    }


def _converted(network: Network, ranges: Ranges | None) -> Any:
    """OpenVINO's model of the network."""
    exact: Any = copy.deepcopy(network).float().eval()
    if ranges is not None:
        exact = rounded(exact, ranges)  # OpenVINO makes integers of layers between roundings
    return _traced(exact, torch.zeros(2, network.config.channels, *network.config.image))


def _traced(module: nn.Module, example: Tensor) -> Any:
    """OpenVINO's model of a module in fp32, for batches of any size of what is like the example.

    Its `convert_model` would do the same, in ten times the time: it checks the trace, and reports that it was called.
    """
    from openvino.frontend import FrontEndManager
    from openvino.frontend.pytorch.ts_decoder import TorchScriptPythonDecoder

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that tracing is old, and sizes of pictures become constants: they are
        traced = torch.jit.trace(module, example, check_trace=False)
        decoder = TorchScriptPythonDecoder(traced)  # the frontend does not keep it alive
        frontend = FrontEndManager().load_by_framework("pytorch")
        model = frontend.convert(frontend.load(decoder))
    model.reshape([-1, *example.shape[1:]])
    _fold_ranges(model)
    return model


def _fold_ranges(model: Any) -> None:
    """Make constants of the formulas that the ranges of roundings come as: without, OpenVINO sees no integers."""
    from openvino import Model
    from openvino.passes import ConstantFolding, Manager

    roundings = [node for node in model.get_ops() if node.get_type_name() == "FakeQuantize"]
    if roundings:
        bounds = [node.input_value(i) for node in roundings for i in range(1, 5)]
        folding = Manager()
        folding.register_pass(ConstantFolding())
        folding.run_passes(Model(bounds, []))  # these nodes alone: the weights, folded too, would be rounded numbers


def _key(ov: Any, core: Any, network: Network, settings: dict[str, Any], ranges: Ranges | None) -> str:
    """A hash of all that a compiled network follows from."""
    known = hashlib.blake2b(digest_size=20)
    machine = [core.get_property("CPU", name) for name in ("FULL_DEVICE_NAME", "OPTIMIZATION_CAPABILITIES")]
    facts = [FORMAT, ov.__version__, torch.__version__, machine, settings["INFERENCE_PRECISION_HINT"]]
    known.update(json.dumps([*facts, config_to_json(network.config), ranges], sort_keys=True).encode())
    for name, tensor in network.state_dict().items():
        known.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
        known.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())
    return known.hexdigest()


def _read(core: Any, file: Path, settings: dict[str, Any]) -> Any:
    """The compiled network in this file; None where there is none, or OpenVINO refuses it."""
    try:
        found = core.import_model(io.BytesIO(file.read_bytes()), "CPU", settings)
        os.utime(file)  # the latest are kept
    except (OSError, RuntimeError):
        return None
    return found


def _keep(file: Path, model: Any) -> bool:
    """Write a compiled network and forget those that were not used for longest; whether the cache can be written."""
    try:
        with replacing(file) as temporary:
            temporary.write_bytes(model.export_model().getbuffer())
    except VitralError:
        return False
    by_age = sorted(file.parent.glob("*.blob"), key=lambda one: one.stat().st_mtime)
    for old in by_age[:-_KEPT]:
        with contextlib.suppress(OSError):
            old.unlink()
    return True
