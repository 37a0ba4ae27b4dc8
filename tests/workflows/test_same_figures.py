"""Test that `evaluate` gives the metrics that the run reported, to the last image, also in bf16."""

import os
import stat

import pytest

from vitral.workflows.evaluate import evaluate
from vitral.workflows.train import train


@pytest.mark.slow
def test_evaluate_repeats_the_figures_of_the_run_and_weights_are_readable(tmp_path):
    run = train(data="digits", epochs=2, precision="bf16", out=str(tmp_path / "run"), quiet=True)
    found = evaluate(run.folder, precision="bf16")
    assert found.to_json() == run.result["test"]
    mask = os.umask(0o022)
    os.umask(mask)
    mode = stat.S_IMODE((run.folder / "model.safetensors").stat().st_mode)
    assert mode == 0o666 & ~mask
