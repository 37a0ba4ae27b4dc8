"""`vitral.load`: weights of any kind become a predictor."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from vitral.device import choose, plain_modes
from vitral.errors import UsageError, warn
from vitral.inference.engines.int8_ranges import Calibration, ranges_file, read_ranges
from vitral.inference.generation import search_by
from vitral.inference.outputs import output_of
from vitral.inference.predictor import Engine, Predictor, int8_engine
from vitral.inference.tta import Views
from vitral.kinds import checked, keywords_of
from vitral.weights.fitted import check_ranges
from vitral.weights.load import locate, read
from vitral.weights.notes import Alarm, LeftOut


@partial(checked, options=keywords_of(read))
@plain_modes()
def load(
    source: str | Path | nn.Module | Predictor,
    *,
    device: str = "auto",
    precision: str = "auto",
    engine: Engine = "auto",
    tta: Views = "none",
    beams: int = 1,
    **options: Any,
) -> Predictor:
    """Load a predictor.

    `source` is one of:

    - a run folder, or a weights file of any known format;
    - `timm:NAME` or `hf:ORG/NAME` (a hub), or `demo` (a built-in model);
    - a network in memory, of vitral, timm, torchvision or transformers. It is left unchanged. If both it and the
      predictor are in fp32 on the CPU, they share their tensors: training one changes the other;
    - a `Predictor`, which is returned as it is.

    `device` is `auto` (a GPU if there is one), `cpu`, `cuda` or `mps`.

    `precision`:

    - `auto`: bf16 if the device has instructions for it and the network is wide enough to gain, else fp32;
    - `bf16`, `fp32`;
    - `int8`: quantized dense layers, for weights that `vitral quantize` has calibrated.

    `engine`:

    - `auto`: the fastest of vitral's own on this machine; results equal those of `plain` up to rounding;
    - `plain`: the PyTorch module, bit for bit;
    - `packed`: torch's oneDNN with weights in its own layout, for a ViT on a CPU;
    - `compiled`: torch.compile, which takes up to a minute at the first call;
    - `openvino`: OpenVINO on the CPU (`vitral[openvino]`).

    `tta` averages over views of each image: `none`, `mirror` (2 views), `shifts` (3), `both` (6). `beams` is the number
    of texts that beam search keeps, for a network that reads text; 1 is greedy search (`vitral.inference.generation`).

    `options` adapt the weights, or state facts that a file lacks (`vitral.weights.load.read`):

    - `image_size`, `patch_size`, `channels`, `classes` with `new_head`: new values; `scheme`: resizing of positions;
    - `format`, `heads`, `like` (`timm:NAME`): the format, the number of heads, the architecture;
    - `weights_key`: the prefix of the network in a file that holds several;
    - `class_order`: `natural`, `text` or a file of names, for classes whose names no file states;
    - `levels`: black and white of images with more than 8 bits (`vitral.Preprocessing`).

    The status of each tensor, and each assumption, is in the predictor's `account`; what might make all answers wrong
    is a Python warning: a second network in the file, values that are not finite, other levels than those of training.
    So are numbers fitted at the end of a run that do not hold with these options, and are left out.

    Raises:

    - `RunError` for a folder that is not a run, or a run without weights;
    - `WeightsError` for weights that are missing, damaged, of an unknown format, or do not fit;
    - `UsageError` for unknown options, another number of `classes` without `new_head`, and a device, precision or
      engine that is not available for this network; for int8 at another size than its ranges were measured at;
    - `MissingExtraError` for an engine, or a package that reads the weights, that is not installed.
    """
    if isinstance(source, Predictor):
        if options or (device, precision, engine, tta, beams) != ("auto", "auto", "auto", "none", 1):
            raise UsageError("a predictor is loaded already", hint="pass these options where its weights are loaded")
        return source
    if isinstance(source, nn.Module) and precision == "int8":
        why = "the ranges of its layers are read from a file next to the weights"
        raise UsageError("a network in memory is not computed in int8", why=why, hint="vitral.convert, vitral quantize")
    loaded = read(source, **options)
    weights = loaded.weights
    network, measured = search_by(loaded.build(), beams), Calibration({})
    if device == "auto" and (precision == "int8" or engine == "openvino"):
        device = "cpu"
    if precision == "int8" and not isinstance(source, nn.Module):
        precision = "auto"
        if device == "cpu" and engine in ("auto", "packed"):
            int8_engine(network, torch_alone=engine == "packed", where=source)  # before a hint to calibrate
        measured = read_ranges(ranges_file(locate(source)[0]), network, source)
        check_ranges(loaded.account.changes, source)
    fields, left_out = measured.refitted(weights.output)
    named = loaded.reference if isinstance(source, nn.Module) else str(source)
    predictor = Predictor(
        network,
        weights.preprocessing,
        weights.classes,
        machine=choose(device, precision, dim=weights.config.dim),
        source=named,
        engine=engine,
        ranges=measured.ranges or None,
        tta=tta,
        output=output_of(weights.classes, fields, weights.statistics),
    )
    predictor.left_out[:0] = left_out
    predictor.note = "; ".join(filter(None, (predictor.note, measured.warning, predictor.machine.caution)))
    predictor.account = loaded.account.noted(*predictor.left_out)
    predictor.held.lent = isinstance(source, nn.Module)  # otherwise this predictor alone has the network
    for note in predictor.account.notes:
        if isinstance(note, Alarm | LeftOut):
            warn(f"{named}: {note.removeprefix('WARNING ')}")
    return predictor
