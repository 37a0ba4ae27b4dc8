"""`vitral demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from vitral.cli.options import Format, Help
from vitral.cli.output import print_json, print_prediction, program, say


def demo(
    *,
    out: Annotated[str, Help("folder for images and heat maps")] = "vitral-demo",
    serve: Annotated[bool, Help("show the model in the browser instead, until Ctrl-C")] = False,
    port: Annotated[int, Help("port of --serve; 0 takes a free one")] = 8000,
    format: Format = "text",
) -> int:
    """Try the small built-in model on generated drawings, without data or an internet connection."""
    if serve:
        return _serve(port)
    from vitral.demo.command import demo as run_demo

    result = run_demo(Path(out))
    if format == "json":
        print_json(result.to_json())
        return 0
    for line in result.about():
        say(line)
    for prediction in result.predictions:
        print_prediction(prediction, 3)
    say(f"\nCorrect: {result.right} of {len(result.predictions)}")
    say(f"Map      {result.page}: the heat map of one prediction")
    say(f"Sheet    {result.sheet}: the heat maps of all predictions")
    say("\nNext:")
    for command in result.next_commands():
        say(f"  {program()} {command}")
    return 0


def _serve(port: int) -> int:
    """Serve the built-in model on this machine alone."""
    from vitral.cli.serve import serve
    from vitral.demo import IMAGES
    from vitral.demo.command import SHOWN
    from vitral.weights.read.references import DEMO, is_included

    reference = "demo" if is_included("demo") else f"demo={DEMO}"  # a file or run named demo exists here
    return serve((reference,), port=port, example=str(IMAGES / f"{SHOWN}.png"))
