"""Ray Serve on this machine, in processes of its own: two replicas answer as Python does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import vitral
from freeports import free_port
from vitral.demo import IMAGES

PROGRAM = """
import json, sys
import httpx, ray
from ray import serve
from ray_serve import application

port = int(sys.argv[1])
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
serve.start(http_options={"host": "127.0.0.1", "port": port})
app = application(
    {"demo": "demo"}, precision="fp32", device="cpu",
    deployment={"num_replicas": 2, "ray_actor_options": {"num_cpus": 0.5}},
)
serve.run(app)
with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120, trust_env=False) as client:
    answers = []
    for image in sys.argv[3:]:
        with open(image, "rb") as file:
            found = client.post("/v1/predict?top=10", content=file.read(), headers={"Content-Type": "image/png"})
        answers.append(found.json())
    bad = client.post("/v1/predict", content=b"no image", headers={"Content-Type": "image/png"})
    replicas = serve.status().applications["default"].deployments["vitral"].replica_states
    found = {"answers": answers, "bad": bad.json(), "ready": client.get("/readyz").status_code}
    with open(sys.argv[2], "w") as file:
        json.dump({**found, "replicas": {str(state): count for state, count in replicas.items()}}, file)
serve.shutdown()
ray.shutdown()
"""


@pytest.mark.slow
def test_replicas_answer_as_python_does(tmp_path):
    pytest.importorskip("ray", reason="needs ray[serve]")
    images = sorted(IMAGES.glob("*.png"))[:4]
    source = str(Path(vitral.__file__).parents[1])
    path = os.pathsep.join((source, str(Path(__file__).parents[2] / "examples")))
    environment = {**os.environ, "PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONWARNINGS": "ignore"}
    words = [sys.executable, "-c", PROGRAM, str(free_port()), str(tmp_path / "found.json"), *map(str, images)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=230)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())
    predictor = vitral.load("demo", precision="fp32", device="cpu")
    for image, answer in zip(images, found["answers"], strict=True):
        expected = predictor(image)
        top = answer["predictions"][0]["top"]
        assert [one["class"] for one in top] == [name for name, _ in expected.top(10)]
        assert np.allclose([one["probability"] for one in top], [each for _, each in expected.top(10)], atol=1e-5)
    assert found["bad"]["type"] == "/docs#unreadable-image"
    assert found["ready"] == 200
    assert sum(found["replicas"].values()) == 2
