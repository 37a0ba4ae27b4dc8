"""deploy/slurm and deploy/kubernetes/train.yaml parse, and train here with programs in the place of a cluster's."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from freeports import free_port
from running import TINY, as_words
from vitral.cli.parsing import parse
from vitral.cli.train import train_options

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
SBATCH = DEPLOY / "slurm" / "train.sbatch"

PROGRAMS = {
    "scontrol": 'if [ "$1" = show ]; then echo localhost; else echo "$@" >> "$CALLS"; fi',
    "srun": """trap 'kill -USR1 "$one" "$two"' USR1
"$@" & one=$!
"$@" & two=$!
wait "$one" || a=$?
wait "$one" || a=$?
wait "$two" || b=$?
exit "${a:-${b:-0}}\"""",
}
"""Programs of SLURM: two machines, which are this one."""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, text in PROGRAMS.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)
    port = free_port()
    torchrun = f'#!/bin/bash\nexec {shlex.quote(sys.executable)} -m torch.distributed.run "$@"\n'
    (programs / "torchrun").write_text(torchrun)
    (programs / "torchrun").chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "CALLS": str(tmp_path / "calls"),
        "RANKS": "1",
        "RDZV_PORT": str(port),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "PET_LOCAL_ADDR": "localhost",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "MASTER": "localhost",
    }


def script_of(kind: str) -> str:
    if kind == "slurm":
        return SBATCH.read_text()
    yaml = pytest.importorskip("yaml", reason="needs PyYAML")
    _, job = yaml.safe_load_all((DEPLOY / "kubernetes" / "train.yaml").read_text())
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["bash", "-euc"]
    return container["args"][0]


@pytest.mark.parametrize("kind", ["slurm", "kubernetes"])
def test_scripts_parse_and_type_options_that_exist(kind):
    script = script_of(kind)
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    joined = re.sub(r'"\$[^"]*"', "1", script.replace('"$@"', "").replace("\\\n", " "))
    line = next(line for line in joined.splitlines() if "torchrun" in line and "-m vitral" in line)
    words = shlex.split(line.removesuffix(" &"))
    words = words[words.index("torchrun") + 1 :]
    given, rest = get_args_parser().parse_known_args([*words[: words.index("-m")], "-m", "vitral"])
    assert not rest
    assert int(given.shutdown_timeout) < 300
    every = re.findall(r"(?:set -- |words=\()([^);]*)", joined)
    assert len(every) == 2
    for options in every:
        assert parse("train", train_options(), shlex.split(options))


def test_the_job_of_kubernetes_is_as_large_as_its_command_and_mounts_what_it_uses():
    yaml = pytest.importorskip("yaml", reason="needs PyYAML")
    service, job = yaml.safe_load_all((DEPLOY / "kubernetes" / "train.yaml").read_text())
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    script = container["args"][0]
    assert spec["completionMode"] == "Indexed"
    assert f"--nnodes {spec['completions']} " in script
    assert spec["parallelism"] == spec["completions"]
    assert f"{job['metadata']['name']}-0.{pod['subdomain']}" in script
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == spec["template"]["metadata"]["labels"]
    assert service["spec"]["clusterIP"] == "None"
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    assert int(re.search(r"--shutdown-timeout (\d+)", script)[1]) < pod["terminationGracePeriodSeconds"]


@pytest.mark.soak
@pytest.mark.slow
def test_a_job_of_slurm_that_is_warned_is_queued_again_and_resumes(make_images, tmp_path, environment):
    out = tmp_path / "run"
    words = [str(make_images({"a": 15, "b": 15})), str(out), *as_words({**TINY, "epochs": 300}), "--quiet"]
    job = subprocess.Popen(["bash", str(SBATCH), *words], env=environment, start_new_session=True)
    until = time.monotonic() + 100
    while not (out / "checkpoints" / "last.safetensors").exists():
        assert job.poll() is None
        assert time.monotonic() < until
        time.sleep(0.05)
    os.kill(job.pid, signal.SIGUSR1)
    assert job.wait(60) == 0
    assert Path(environment["CALLS"]).read_text() == "requeue 7\n"
    assert not (out / "result.json").exists()
    done = subprocess.run(["bash", str(SBATCH), *words], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert json.loads((out / "result.json").read_text())["epochs"] == 300


@pytest.mark.soak
@pytest.mark.slow
def test_pods_of_kubernetes_train_together(make_images, tmp_path, environment):
    words = " ".join(as_words({**TINY, "epochs": 2}))
    script = script_of("kubernetes").replace("/runs/", f"{tmp_path}/runs/")
    script = script.replace("/images --model B/16 --epochs 30", f"{make_images({'a': 15, 'b': 15})} {words}")
    script = script.replace("29500", environment["RDZV_PORT"])
    pods = [
        subprocess.Popen(["bash", "-euc", script], env={**environment, "JOB_COMPLETION_INDEX": str(index)})
        for index in range(2)
    ]
    assert [pod.wait(100) for pod in pods] == [0, 0]
    assert json.loads((tmp_path / "runs" / "photos" / "result.json").read_text())["epochs"] == 2
