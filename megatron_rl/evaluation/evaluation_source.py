"""The inputs of an evaluation: weights, settings, and the folder of results."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl.annealing import AnnealConfig
from megatron_rl.checkpoints import adapter_checkpoint, directory
from megatron_rl.checkpoints.hf import HfDirectory
from megatron_rl.config.cli.command_line import Root
from megatron_rl.config.keys import flat
from megatron_rl.config.load import change_values, compose, validate
from megatron_rl.config.schema import Config
from megatron_rl.models import read_architecture
from megatron_rl.models.parameter_map import hf_names
from megatron_rl.run.files import EVALUATION
from megatron_rl.run.hub import local_folder
from megatron_rl.run.run_record import RUNTIME, Difference, model_fingerprint
from megatron_rl.run.start import CHECKPOINTS, EXPORTS, engine_of_machine, is_run, values_of_run
from megatron_rl.runtime.digest import file_digest

_DEFAULT_OUT = Path("runs/evaluation")
_OWN_ROOT = Root()  # the package's own
# Settings that leave the responses, and their metrics, as they are: they may change between
# two starts. Of the sections that are not named here everything may.
_DECIDING = ("seed", "rollout", "reward", "evaluation", "prompts", "plugins")
_MUTABLE = (
    *RUNTIME,
    "rollout.temperature",  # that of the evaluation counts
    *(f"rollout.anneal.{name}" for name in AnnealConfig.model_fields),  # of training alone
    "rollout.top_p",
    "rollout.top_k",
    "rollout.max_prompt_tokens",  # the prompts are compared by content
    "evaluation.every_steps",
    "evaluation.at_start",
    "evaluation.at_end",
    "evaluation.num_prompts",
    "evaluation.pass_at",  # computed from the responses that are there
    "evaluation.stop_after",
)
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Weights:
    """The weights after ``step``: a checkpoint of a run, or a HF directory.

    Example: ``Weights(20, Path("runs/a/checkpoints/step_000020"))``.
    """

    step: int
    path: Path

    @property
    def is_checkpoint(self) -> bool:
        return (self.path / directory.MANIFEST).is_file()

    @property
    def fingerprint(self) -> str:
        """Tells these weights from others, without reading them whole."""
        if self.is_checkpoint:
            return file_digest(self.path / directory.MANIFEST)
        return model_fingerprint(self.path) or ""


@dataclass
class StoredWeights:
    """Weights on the disk in the role of a policy that gives them to an engine: every rank reads
    all of them, one tensor at a time."""

    weights: Weights
    model: Path  # the HF directory that has their architecture
    dtype: torch.dtype  # of the engine, which takes this or float32
    gathered_bytes_sent: int = 0

    def gathered_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(HF name, whole tensor), in one order on all ranks. Raises ValueError where they are not
        those of the architecture."""
        arch, _ = read_architecture(self.model)
        path = self.weights.path
        if self.weights.is_checkpoint:
            tensors = adapter_checkpoint.read_hf(path, self.model, arch, lambda _: None)
        else:
            stored = HfDirectory(path, arch.prefixes)
            stored.check(arch)
            tensors = ((name, stored.read(name)) for name in hf_names(arch))
        for name, tensor in tensors:
            yield name, tensor if tensor.dtype == self.dtype else tensor.float()


@dataclass(frozen=True)
class Evaluation:
    """One launch: ``weights``, ascending by step, are asked by settings (``values``, composed and
    valid); results go to ``out``. Plain data: rank 0 finds it for all."""

    values: Mapping[str, Any]
    weights: tuple[Weights, ...]
    out: Path

    @property
    def config(self) -> Config:
        return _valid(self.values)


def _valid(values: Mapping[str, Any]) -> Config:
    return validate(Config, dict(values), "the settings of the evaluation")


def find_evaluation(
    words: Sequence[str], steps: str | None, out: Path | None, root: Root = _OWN_ROOT
) -> Evaluation:
    """Checkpoints (else exports) of a run by its settings, or a model, as step 0, by composed ones.

    Args:
        words: overrides, which change the settings, and at most one folder of a run: the word that
            has no "=" in it. Without a run there need be no ``data.train``.
        steps: of a run ``last`` (the default), ``all`` (with the model that the run began with, as
            step 0) or numbers (``0,20,40``).

    Raises:
        ValueError: there is no such run or step, or the words are no settings.
    """
    overrides = [word for word in words if "=" in word or word.startswith("~")]
    runs = [word for word in words if word not in overrides]
    if len(runs) > 1:
        raise ValueError(f"{' '.join(runs)}: one run at a time; settings are written key=value")
    if not runs:
        if steps is not None:
            raise ValueError(f"--steps {steps}: is for checkpoints of a run; give its run_dir")
        keys = {text.partition("=")[0].lstrip("+") for text in overrides}
        chosen = [] if "rollout" in keys else [f"rollout={engine_of_machine()}"]
        values = compose(root.config_name, [*chosen, *overrides], root.config_dir)
        values["data"].setdefault("train", [])
        model = Path(local_folder(_valid(values).model.path))
        values["model"]["path"] = str(model)
        return Evaluation(values, (Weights(0, model),), out or _DEFAULT_OUT)
    run = Path(runs[0])
    if root != _OWN_ROOT:
        raise ValueError(f"{run}: has its own settings; leave --config-name and --config-dir out")
    if not is_run(run):
        raise ValueError(
            f"{run}: no folder of a run (no config.json of one in it); give the run_dir of a"
            " training, or model.path=DIR for a model alone"
        )
    values = values_of_run(run)
    change_values(values, overrides)
    weights = _chosen(run, steps or "last", Path(_valid(values).model.path))
    return Evaluation(values, weights, out or run / EVALUATION)


def _chosen(run: Path, steps: str, model: Path) -> tuple[Weights, ...]:
    there = _saved(run)
    if not there and steps != "0":
        raise ValueError(
            f"{run}: neither {CHECKPOINTS}/ nor {EXPORTS}/ has a whole step; let the run save"
            f" one, or evaluate its export alone: model.path={run / 'export'}"
        )
    there[0] = Weights(0, model)
    if steps in ("last", "all"):
        wanted = sorted(there) if steps == "all" else [max(there)]
    elif all(word.strip().isdecimal() for word in steps.split(",")):
        wanted = sorted({int(word) for word in steps.split(",")})
    else:
        raise ValueError(f"--steps {steps}: give all, last, or numbers such as 20,40")
    missing = [step for step in wanted if step not in there]
    if missing:
        raise ValueError(
            f"--steps {steps}: {run} has no whole checkpoint or export of step"
            f" {', '.join(map(str, missing))}; it has {', '.join(map(str, sorted(there)))}"
        )
    return tuple(there[step] for step in wanted)


def _saved(run: Path) -> dict[int, Weights]:
    """The checkpoints and exports of a run, by step; warns of incomplete checkpoints."""
    found = {step_of(path): Weights(step_of(path), path) for path in directory.steps(run / EXPORTS)}
    for path in directory.steps(run / CHECKPOINTS):
        wrong = directory.problem(path)
        if wrong is not None:
            logger.warning("checkpoint %s is skipped: %s", path, wrong)
        else:
            found[step_of(path)] = Weights(step_of(path), path)
    return found


def step_of(path: Path) -> int:
    """0 of what is no step of a run."""
    return directory.step_of(path) or 0


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Difference]:
    """Keys that decide the responses and are not equal in two ``config.json`` of an evaluation."""
    before = dict(flat({key: old[key] for key in _DECIDING if key in old}))
    now = dict(flat({key: new[key] for key in _DECIDING if key in new}))
    return [
        Difference(key, before.get(key), now.get(key))
        for key in sorted(before.keys() | now.keys())
        if key not in _MUTABLE and before.get(key) != now.get(key)
    ]
