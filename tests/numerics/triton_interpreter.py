"""Runs a program where vLLM finds Triton although there is no GPU: python -m THIS PROGRAM.py
[ARGUMENT ...].

With TRITON_INTERPRET=1 kernels are interpreted. vLLM uses Triton where it finds a driver; on a CPU
it looks for one of that name, which the wheels of Triton do not have, and interpreting needs none.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import triton.backends
from triton.runtime import interpreter


class Driver:
    """Is there, and is never asked for anything."""

    @staticmethod
    def is_active() -> bool:
        return True


class Index(int):
    """The variable of a kernel's loop. A compiled kernel may convert it; the interpreter has a
    plain int."""

    def to(self, dtype: Any) -> Index:
        return self


def indices(*bounds: int) -> Iterator[Index]:
    return map(Index, range(*bounds))


if __name__ == "__main__":
    assert os.environ["TRITON_INTERPRET"] == "1", "kernels would be compiled"
    triton.backends.backends["cpu"] = SimpleNamespace(driver=Driver, compiler=None)
    interpreter.range = indices
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
