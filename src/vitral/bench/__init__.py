"""`vitral bench`: compare vitral with other libraries in one process, in alternating rounds.

harness.py     timing in alternating rounds: A B A B …
machine.py     description of the machine
memory.py      peak memory of a call
peers.py       the other libraries: how to build and call each
engines.py     vitral's other engines: availability, and a predictor for each
models.py      the network that all libraries build
files.py       training from files: the images, and the loader of each library
measure.py     inference, training, training from files: one row per contender
report.py      rows as a table and as JSON
command.py     options: checked, then carried out
"""
