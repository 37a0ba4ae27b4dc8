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
from vitral.weights import project
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
    """Load weights as a predictor.

    The status of each tensor, and each assumption, is in the predictor's `account`. A Python
    warning reports what could make all predictions wrong: a second network in the file, values that are not finite, or
    other levels than in training. Calibration numbers that are not valid with these options are left out, with a
    warning.

    Args:
        source: A run folder, a weights file of any known format, `timm:NAME` or `hf:ORG/NAME` (a hub), `backbone` or
            `demo` (built-in models), a project that was taught on a page of `vitral label --export`, a network in
            memory of vitral, timm, torchvision or transformers, or a predictor, which is returned as it is. A network
            in memory is left unchanged. If it and the predictor are both in fp32 on the CPU, they share their tensors:
            training one changes the other.
        device: `auto` (a GPU if there is one), `cpu`, `cuda` or `mps`.
        precision: `bf16`, `fp32`, `int8` for weights that `vitral quantize` has calibrated, or `auto`: bf16 if the
            device has instructions for it and the network is wide enough to gain, otherwise fp32. A project is
            computed in fp32, as on its page.
        engine: What computes the network:
            `auto` is the fastest of vitral's engines on this machine, and equals `plain` up to rounding;
            `plain` is the PyTorch module, bit for bit;
            `packed` is torch's oneDNN with weights in its layout, for a ViT on a CPU;
            `compiled` is torch.compile, which takes up to a minute at the first call;
            `openvino` is OpenVINO on the CPU, which needs `vitral[openvino]`.
        tta: Average over views of each image: `none`, `mirror` (2 views), `shifts` (3) or `both` (6).
        beams: Number of texts that beam search keeps, for a network that reads text; 1 is greedy search.
        options: Facts that the file does not contain, and changes to the network. To change the network, pass
            `image_size`, `patch_size`, `channels`, or `classes` with `new_head`. Positions are resized by `scheme`.
            The format, the number of heads and the architecture are stated by `format`, `heads` and `like`
            (`timm:NAME`). In a file of several networks, `weights_key` is the prefix of one. If no file contains the
            names of the classes, `class_order` states their order: `natural`, `text`, or a file of names. `levels` are
            black and white in images of more than 8 bits.

    Returns:
        The predictor: images to predictions.

    Raises:
        RunError: The folder is not a run, or its run has no weights.
        WeightsError: The weights are missing, damaged, of an unknown format, or do not fit.
        UsageError: An option is unknown, `classes` differs from the outputs of the head without `new_head`, or the
            device, precision or engine is not available for this network.
        MissingExtraError: The engine, or a package that reads the weights, is not installed.

    Example:
        predictor = vitral.load("runs/photos")
        print(predictor("cat.jpg").top(2))
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
    if loaded.format == project.NAME and precision == "auto":
        precision = "fp32"  # as on the page, where a person has seen its answers
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
