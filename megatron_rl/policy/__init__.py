"""The policy: the only package that imports megatron."""

import warnings

# Each of these comes once for every module and rank: megatron says what is not installed
# (precision.describe says it once), and torch announces new names of collectives.
warnings.filterwarnings("ignore", module=r"megatron\.")
warnings.filterwarnings("ignore", message="`torch.distributed", category=FutureWarning)
