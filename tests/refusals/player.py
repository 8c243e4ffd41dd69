"""Starts of ``megatron_rl.train`` on ranks that are there, up to the first part that takes long.

All that a start reads and checks is the real thing; only what comes after it is not built.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import logging
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub.constants
import torch.distributed as dist
from megatron.core import parallel_state

import megatron_rl.trainer.build  # noqa: F401 (here: once for the ranks of all tables)
from megatron_rl import train
from megatron_rl.config import load
from megatron_rl.config.cli.command_line import arguments
from megatron_rl.engine.engine import VllmEngine
from megatron_rl.policy.megatron_policy import MegatronPolicy
from megatron_rl.runtime import launch
from megatron_rl.runtime.guard import failure
from tests.refusals.inputs import Row, words_of
from tests.trials.material import Material

Played = tuple[str, str, float]  # screen, part that was reached (empty: refused), seconds
PARTS = {"policy": MegatronPolicy, "engine": VllmEngine}


class Reached(Exception):
    """The start got as far as building this part."""


def play(table: str, rows: Mapping[str, Row], folder: Path, until: str) -> dict[str, Played]:
    """Collective: every row's start, until the ``policy`` or the ``engine`` would be built."""
    huggingface_hub.constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    size = dist.get_world_size()
    world = launch.World(dist.get_rank(), size, dist.get_rank(), folder.name, None, size)
    launch.start = lambda: world  # the ranks of this call have joined already
    PARTS[until].__init__ = _reached(until)
    # Most of a start is Hydra's. Rows of one folder and the same words are composed once.
    composed = functools.cache(load.hydra_compose)
    load.hydra_compose = lambda name, words: composed(name, tuple(words))
    material, place = Material(folder / "material"), folder / "row"
    played = {}
    for name, row in rows.items():
        words = world.from_main(lambda: words_of(table, row, place, material))  # noqa: B023
        played[name] = _started(row, words, size)
        assert not (place / "ran").exists(), f"{name}: code of the input was run"
        dist.barrier()  # the next row's files take the place of this one's
    return played


def _reached(name: str) -> Any:
    def build(self: object, *args: object, **kwargs: object) -> None:
        raise Reached(name)

    return build


def _started(row: Row, words: Sequence[str], size: int) -> Played:
    began = time.monotonic()
    reached = ""
    with _screen() as screen:
        try:
            if "command" in row:
                sys.argv = [row["command"], *words]
                importlib.import_module(row["command"]).main()
            else:
                train.run(arguments(words, size))
        except Reached as stop:
            reached = str(stop)
        except SystemExit as left:
            if isinstance(left.code, str):  # else the message has been printed
                print(left.code)
        except Exception as error:  # noqa: BLE001 (shown as a user sees it)
            message = failure.describe(error)
            print(message.traceback + message.text, file=screen)
    parallel_state.destroy_model_parallel()
    return screen.getvalue(), reached, time.monotonic() - began


@contextlib.contextmanager
def _screen() -> Iterator[io.StringIO]:
    """Both streams, and the package's log from this start alone."""
    logging.getLogger("megatron_rl").handlers.clear()
    screen = io.StringIO()
    with contextlib.redirect_stdout(screen), contextlib.redirect_stderr(screen):
        yield screen
