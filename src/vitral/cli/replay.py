"""`vitral replay`: a batch of a run, made again."""

from __future__ import annotations

from typing import Annotated

from vitral.cli.options import Format, Help
from vitral.cli.output import print_json, print_text, say
from vitral.console import stderr, stdout, table


def replay(
    run: Annotated[str, Help("run folder", "RUN")],
    *,
    step: Annotated[int | None, Help("optimizer step, from 1; of accumulated micro-batches the first")] = None,
    epoch: Annotated[int | None, Help("epoch, from 1, with --image")] = None,
    image: Annotated[str | None, Help("training image, by its file name, whose batch to show")] = None,
    exact: Annotated[bool, Help("train up to the batch, so that losses are the losses of training")] = False,
    out: Annotated[str | None, Help("contact sheet, a .png (default: replay-EPOCH-BATCH.png)")] = None,
    format: Format = "text",
) -> int:
    """Show a batch as the network saw it: augmented and mixed, with labels and losses.

    The images are exact, made again from the run folder and its data. Losses are by the run's best weights, or with
    --exact by those before the step.
    """
    from vitral.workflows.checks.contact_sheet import check_png, contact_sheet
    from vitral.workflows.replay import replay as replay_batch

    if out:
        check_png(out)  # before training up to the batch
    found = replay_batch(run, step=step, epoch=epoch, image=image, exact=exact, console=stderr())
    path = check_png(out or f"replay-{found.epoch}-{found.batch}.png")
    contact_sheet([(pixels, found.caption(index)) for index, pixels in enumerate(found.pixels)], path)
    if format == "json":
        print_json({**found.to_json(), "sheet": str(path)})
    else:
        print_text(
            f"epoch {found.epoch}, batch {found.batch}, step {found.step}: loss {float(found.losses.mean()):.4f} "
            f"by the weights {'before this step' if exact else 'that the run kept; --exact: before this step'}"
        )
        rows = table()
        for heading in ("image", "label", "predicted", "loss"):
            rows.add_column(heading, justify="right" if heading == "loss" else "left", overflow="fold")
        for index, name in enumerate(found.names):
            predicted, confidence = found.predicted(index)
            rows.add_row(name, found.label(index), f"{predicted} {confidence:.1%}", f"{float(found.losses[index]):.4f}")
        stdout().print(rows)
    say(f"Sheet    {path}")
    return 0
