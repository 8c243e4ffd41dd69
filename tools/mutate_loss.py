"""Plants plausible bugs in the formulas of megatron_rl/loss and checks that the tests notice.

    python tools/mutate_loss.py                  all of them
    python tools/mutate_loss.py --sample 20 --seed 1

One at a time: a bug is a text replacement in one module (tools/loss_mutations lists three or more
for each formula). The module is loaded from the changed text, in memory; its test file is loaded
afresh and run until a test fails. Exit status 1 when a bug survives.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.abc
import importlib.util
import random
import sys
import types
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.loss_mutations import MUTATIONS, TESTS, Mutation

ROOT = Path(__file__).resolve().parents[1]

FAILURES = (
    AssertionError,
    ArithmeticError,
    AttributeError,
    LookupError,
    NameError,
    RuntimeError,
    TypeError,
    ValueError,
    pytest.fail.Exception,
)


class ChangedSource(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from a given text."""

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.text = text

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        return importlib.util.spec_from_loader(fullname, self) if fullname == self.name else None

    def exec_module(self, module: types.ModuleType) -> None:
        exec(compile(self.text, self.name, "exec"), module.__dict__)


def failure(mutation: Mutation | None, test_module: str) -> str | None:
    """The first test of ``test_module`` that fails with the bug in place, None if all pass."""
    finders = [] if mutation is None else [changed(mutation)]
    # The configuration holds functions of the loss: it is loaded afresh too.
    fresh = ("megatron_rl.loss", "megatron_rl.config", "tests.unit.loss")
    for name in [name for name in sys.modules if name.startswith(fresh)]:
        del sys.modules[name]
    sys.meta_path[:0] = finders
    try:
        tests = importlib.import_module(f"tests.unit.loss.{test_module}")
        for name, test in vars(tests).items():
            if name.startswith("test_"):
                try:
                    test()
                except FAILURES as error:
                    return f"{name} ({type(error).__name__})"
    finally:
        for finder in finders:
            sys.meta_path.remove(finder)
    return None


def changed(mutation: Mutation) -> ChangedSource:
    """The module with the bug in it.

    Raises:
        ValueError: the text that it replaces does not occur just once.
    """
    (path,) = (ROOT / "megatron_rl" / "loss").rglob(f"{mutation.module}.py")
    text = path.read_text()
    num = text.count(mutation.old)
    if num != 1:
        raise ValueError(
            f"{mutation.formula}: {mutation.old!r} occurs {num} times in {mutation.module}.py;"
            " make it unique"
        )
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return ChangedSource(name, text.replace(mutation.old, mutation.new))


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sample", type=int, help="how many, drawn at random; all of them without it"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.sample is not None and not 1 <= options.sample <= len(MUTATIONS):
        parser.error(
            f"--sample {options.sample}: give a number from 1 to {len(MUTATIONS)}, or leave it out"
        )
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = options_of(arguments)
    chosen = MUTATIONS
    if options.sample is not None:
        chosen = random.Random(options.seed).sample(MUTATIONS, options.sample)
    for test_module in sorted(set(TESTS.values())):
        broken = failure(None, test_module)
        if broken:
            raise ValueError(f"{test_module}: {broken} fails without any bug planted; fix it first")
    survivors = [m for m in chosen if failure(m, TESTS[m.module]) is None]
    for survivor in survivors:
        where = f"{survivor.module}.{survivor.formula}"
        print(f"SURVIVED {where}: {survivor.old!r} -> {survivor.new!r}")
    noticed = len(chosen) - len(survivors)
    formulas = {mutation.formula for mutation in chosen}
    print(f"{noticed} of {len(chosen)} bugs noticed, {len(formulas)} formulas")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
