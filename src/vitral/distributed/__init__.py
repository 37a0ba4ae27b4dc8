"""Several processes that train one network: ranks, strategies, launch. PyTorch's own engine does the work.

`ranks.current()` is this process among them. One process alone has the same object with nothing to do.
"""
