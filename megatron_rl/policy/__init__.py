"""The policy: the only room that imports megatron."""

import warnings

# Each of these comes once for every module and rank: megatron saying what is not installed (model.py says it once), and torch
# announcing new names of collectives that megatron calls.
warnings.filterwarnings("ignore", module=r"megatron\.")
warnings.filterwarnings("ignore", message="`torch.distributed", category=FutureWarning)
