"""OpenVINO engine on a CPU, for `Predictor(engine="openvino")`.

The network is traced in fp32 with a dynamic batch size, and OpenVINO's CPU plugin compiles it: in bf16 where the
machine supports it, with torch's number of threads. Compiled networks are cached in the user's cache
(`vitral/openvino`), under a hash of all their inputs. OpenVINO is an extra, `vitral[openvino]`.
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
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from vitral.atomic import replacing
from vitral.device import Machine, cpu_by_default
from vitral.digest import check, with_digest, without_digest
from vitral.errors import MissingExtraError, UsageError, VitralError
from vitral.folders import cache_folder
from vitral.inference.engines import int8
from vitral.inference.engines.int8 import Ranges
from vitral.model import Network
from vitral.model.registry import config_to_json
from vitral.system import excluded_cpu_flags
from vitral.weights.native import hash_state

if TYPE_CHECKING:
    import openvino

FORMAT = 2
"""Version of the cache. A new number invalidates all entries."""
_CACHE_SIZE = 8  # compiled networks in the cache; each is as large as its weights


class Compiled(nn.Module):
    """A network compiled by OpenVINO: standardized images (B, C, H, W) to logits (B, K) fp32."""

    def __init__(self, model: openvino.CompiledModel, note: str):
        super().__init__()
        self.note = note
        """Source of the compiled network, compiler or cache, and the seconds that it took."""
        self._request = model.create_infer_request()
        self._lock = threading.Lock()  # a request computes one batch at a time

    def forward(self, images: Tensor) -> Tensor:
        pixels = np.ascontiguousarray(images.float().numpy())
        with self._lock:
            (logits,) = self._request.infer([pixels]).values()
            return torch.from_numpy(logits.copy())  # the next batch overwrites this memory


def compiled(network: Network, machine: Machine, ranges: Ranges | None = None) -> Compiled:
    """Compile a network with OpenVINO, or read it from the cache. With `ranges`, its dense layers are int8.

    Raises `MissingExtraError` without OpenVINO, and `UsageError` for a GPU, and for int8 if the network is no ViT or
    the CPU fails the self-test.
    """
    if machine.device.type != "cpu":
        raise UsageError(f"OpenVINO runs on a CPU here, not on {machine.device}", hint="--device cpu")
    if ranges is not None and (why := unsupported_reason(network)):
        raise UsageError(why, hint="--precision auto")
    started = time.perf_counter()
    ov = package()
    core = shared_core()
    settings = _settings(core, machine)
    file = cache_folder("openvino") / f"{_key(ov, core, network, settings, ranges)}.blob"
    model, done = None if _without_cache.get() else _read(core, file, settings), f"read from {file.parent}"
    if model is None:
        model, done = _compile(core, _converted(network, ranges), settings), "compiled"
        if not _without_cache.get():
            done += f" and kept in {file.parent}" if _keep(file, model) else f"; cannot write to {file.parent}"
    precision = "int8" if ranges is not None else settings["INFERENCE_PRECISION_HINT"]
    seconds = time.perf_counter() - started
    return Compiled(model, f"OpenVINO {str(ov.__version__).partition('-')[0]}, {precision}, {done} in {seconds:.1f} s")


def _compile(core: openvino.Core, model: openvino.Model, settings: Mapping[str, object]) -> openvino.CompiledModel:
    try:
        return core.compile_model(model, "CPU", settings)
    except RuntimeError as error:
        why = " ".join(str(error).split())[:300]
        raise UsageError("OpenVINO cannot compile this network", why=why, hint="leave out --engine openvino") from error


_without_cache: ContextVar[bool] = ContextVar("without_cache", default=False)


@contextlib.contextmanager
def without_cache() -> Iterator[None]:
    """Compile networks without reading or writing the user's cache."""
    token = _without_cache.set(True)
    try:
        yield
    finally:
        _without_cache.reset(token)


def installed() -> bool:
    """True if OpenVINO is installed, without importing it."""
    return find_spec("openvino") is not None


def unsupported_reason(network: nn.Module) -> str:
    """Reason why this network cannot run in int8 here; empty if it can. `MissingExtraError` without OpenVINO."""
    return int8.unsupported_reason(network, unavailable_reason)


def unavailable_reason() -> str:
    """Reason why OpenVINO's int8 is unavailable; empty if it is correct. `MissingExtraError` without OpenVINO.

    OpenVINO offers int8 on every CPU, so a self-test of 0.1 s decides.
    """
    return _trial()[1]


def limitation() -> str:
    """Reason why OpenVINO compiles nothing here, or crashes: a variable that it only half honors. Empty if it works."""
    limited = bool(os.environ.get("ONEDNN_MAX_CPU_ISA")) and bool(excluded_cpu_flags())
    return "OpenVINO compiles no softmax where ONEDNN_MAX_CPU_ISA excludes instructions of the CPU" * limited


@cache
def _trial() -> tuple[int, str]:
    """Largest correct integer weight, and the reason if there is none."""
    if why := limitation():
        return int8.EIGHT_BITS, why
    with torch.autocast("cpu", enabled=False), cpu_by_default():  # the caller may be under others
        for most in (int8.EIGHT_BITS, int8.SEVEN_BITS):
            layer, x = int8.probe(most)
            try:
                model = shared_core().compile_model(_traced(layer, x), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
                (result,) = model.create_infer_request().infer([x.numpy()]).values()
            except RuntimeError as error:
                return most, f"OpenVINO cannot compile int8: {' '.join(str(error).split())[:200]}"
            if np.allclose(result, layer(x).numpy(), atol=0.05):
                return most, ""
    return most, int8.WRONG


def package() -> ModuleType:
    """Import OpenVINO without its telemetry, which otherwise reports the import to its authors.

    Raises `MissingExtraError` if it is not installed.
    """
    try:
        if "openvino" in sys.modules or "openvino_telemetry" in sys.modules:
            import openvino
        else:
            sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]  # marks the module as missing
            try:
                import openvino
            finally:
                del sys.modules["openvino_telemetry"]
    except ImportError as error:
        hint = "pip install 'vitral[openvino]'"
        raise MissingExtraError("OpenVINO is not installed", why=str(error), hint=hint) from error
    return openvino


@cache
def shared_core() -> openvino.Core:
    """OpenVINO's core, one for the process, never destroyed.

    A core installs a signal stack in the thread that creates it, and removes it when it is destroyed. If two cores are
    destroyed in the order of their creation, or one in another thread, the thread keeps a dangling signal stack. Then
    the next signal (a loader worker has exited) is a segmentation fault.

    Raises `UsageError` where ONEDNN_MAX_CPU_ISA is set: OpenVINO then fails to compile, or crashes.
    """
    if why := limitation():
        raise UsageError("OpenVINO is not available", why=why, hint="unset ONEDNN_MAX_CPU_ISA, or another engine")
    return package().Core()


def _settings(core: openvino.Core, machine: Machine) -> dict[str, object]:
    """One batch at a time, on torch's number of threads, which the system may move to free cores."""
    bf16 = machine.precision == "bf16" and "BF16" in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return {
        "INFERENCE_PRECISION_HINT": "bf16" if bf16 else "f32",
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
        "ENABLE_CPU_PINNING": False,
    }


def _converted(network: Network, ranges: Ranges | None) -> openvino.Model:
    """Convert a network to an OpenVINO model."""
    fp32: Any = copy.deepcopy(network).float().eval()
    if ranges is not None:
        fp32 = int8.fake_quantized(fp32, ranges, _trial()[0])  # OpenVINO makes fake-quantized layers int8
    return _traced(fp32, torch.zeros(2, network.config.channels, *network.config.image))


def _traced(module: nn.Module, example: Tensor) -> openvino.Model:
    """Convert a module in fp32 to an OpenVINO model with a dynamic batch size; other sizes are those of `example`.

    OpenVINO's `convert_model` does the same ten times slower, since it checks the trace, and sends telemetry.
    """
    from openvino.frontend import FrontEndManager
    from openvino.frontend.pytorch.ts_decoder import TorchScriptPythonDecoder

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tracing is deprecated, and image sizes become constants, as intended
        traced = torch.jit.trace(module, example, check_trace=False)
        decoder = TorchScriptPythonDecoder(traced)  # the frontend does not keep it alive
        frontend = FrontEndManager().load_by_framework("pytorch")
        model = frontend.convert(frontend.load(decoder))
    model.reshape([-1, *example.shape[1:]])
    _fold_ranges(model)
    return model


def _fold_ranges(model: openvino.Model) -> None:
    """Fold the ranges of `FakeQuantize` nodes to constants; otherwise OpenVINO does not recognize int8."""
    from openvino import Model
    from openvino.passes import ConstantFolding, Manager

    quantizers = [node for node in model.get_ops() if node.get_type_name() == "FakeQuantize"]
    if quantizers:
        bounds = [node.input_value(i) for node in quantizers for i in range(1, 5)]
        folding = Manager()
        folding.register_pass(ConstantFolding())
        folding.run_passes(Model(bounds, []))  # these nodes only: folded weights would be rounded floats


def _key(
    ov: ModuleType, core: openvino.Core, network: Network, settings: Mapping[str, object], ranges: Ranges | None
) -> str:
    """Hash of everything that determines a compiled network."""
    digest = hashlib.blake2b(digest_size=20)
    machine = [core.get_property("CPU", name) for name in ("FULL_DEVICE_NAME", "OPTIMIZATION_CAPABILITIES")]
    key = [FORMAT, ov.__version__, torch.__version__, machine, settings["INFERENCE_PRECISION_HINT"]]
    digest.update(json.dumps([*key, config_to_json(network.config), ranges], sort_keys=True).encode())
    if ranges is not None:
        digest.update(f"weights to {_trial()[0]}".encode())
    hash_state(digest, network.state_dict())
    return digest.hexdigest()


def _read(core: openvino.Core, file: Path, settings: Mapping[str, object]) -> openvino.CompiledModel | None:
    """Read a compiled network from the cache; None if the file is missing or damaged, or OpenVINO refuses it."""
    try:
        cached = file.read_bytes()
        if not check(cached):
            return None
        model = core.import_model(io.BytesIO(without_digest(cached)), "CPU", settings)
        os.utime(file)  # the cache evicts by last use
    except (OSError, RuntimeError, ValueError):
        return None
    return model


def _keep(file: Path, model: openvino.CompiledModel) -> bool:
    """Write a compiled network to the cache and evict the least recently used. True if the cache is writable."""
    try:
        with replacing(file) as temporary:
            temporary.write_bytes(with_digest(model.export_model().getvalue()))
    except VitralError:
        return False
    by_age = sorted(file.parent.glob("*.blob"), key=lambda one: one.stat().st_mtime)
    for old in by_age[:-_CACHE_SIZE]:
        with contextlib.suppress(OSError):
            old.unlink()
    return True
