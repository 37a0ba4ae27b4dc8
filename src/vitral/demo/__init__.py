"""`vitral demo`: a trained network and pictures to try it on, without data and without a network connection.

`model.safetensors` is what `demo` stands for wherever weights are named; `pack` makes it from a run. `drawings` makes
the pictures, `command` is what is typed.
"""
