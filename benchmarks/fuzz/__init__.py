"""Parsers of untrusted bytes, each as a function of bytes. A finding is anything but an answer or a `VitralError`.

`python -m benchmarks.fuzz safetensors --runs 100000 --seed 0 --out FOLDER` mutates small real files; with `--guided`,
atheris guides the mutations by coverage. The result is one line of JSON: runs, answers, refusals, findings, slowest.
"""
