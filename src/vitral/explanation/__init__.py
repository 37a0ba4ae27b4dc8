"""Explain networks: `capture` internals, `inspect` (Figure 7), attribution `methods` and their `faithfulness`."""
