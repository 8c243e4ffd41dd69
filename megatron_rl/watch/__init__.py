"""``python -m megatron_rl.watch``: a run in the terminal."""
