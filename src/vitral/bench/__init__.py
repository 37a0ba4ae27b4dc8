"""`vitral bench`: ours and the other libraries side by side, in one process, in turn.

timing.py      A B A B …: what is timed, and how
machine.py     what a figure was measured on
memory.py      what a call needs above what is there
peers.py       the other libraries: how each is built and called
engines.py     our other engines: which can compute here, and a predictor of each
subject.py     the network that all build
files.py       training from files: the pictures, and who reads them how
measure.py     inference, training, training from files: what is timed of each, and into rows
report.py      rows as a table and as JSON
command.py     what was asked, checked and carried out
"""
