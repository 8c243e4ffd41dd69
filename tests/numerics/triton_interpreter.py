"""Runs a program where vLLM finds Triton although there is no GPU: python -m THIS PROGRAM.py [ARGUMENT ...].

With TRITON_INTERPRET=1 kernels are interpreted. vLLM uses Triton where it finds a driver; on a CPU it
looks for one of that name, which the wheels of Triton do not have, and interpreting needs none.
"""

from __future__ import annotations

import os
import runpy
import sys
from types import SimpleNamespace

import triton.backends


class Driver:
    """Is there, and is never asked for anything."""

    @staticmethod
    def is_active() -> bool:
        return True


if __name__ == "__main__":
    assert os.environ["TRITON_INTERPRET"] == "1", "kernels would be compiled"
    triton.backends.backends["cpu"] = SimpleNamespace(driver=Driver, compiler=None)
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
