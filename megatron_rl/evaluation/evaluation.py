"""Held-out prompts are answered by weights on the disk, through the engine and without a policy;
the folder that keeps the responses."""

import json
import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from megatron_rl.config.schema import Config
from megatron_rl.data.loader import fingerprint
from megatron_rl.data.multimodal.vision import vision_of
from megatron_rl.data.prompts import CATEGORIES
from megatron_rl.data.shared import shared_data
from megatron_rl.data.tokenizer import load_tokenizer, text_of
from megatron_rl.engine.engine import VllmEngine
from megatron_rl.engine.requests import MultimodalConfig, multimodal_config
from megatron_rl.engine.weights.stream import expected_tensors
from megatron_rl.evaluation.evaluation_source import Evaluation, StoredWeights, Weights, differences
from megatron_rl.reporting.answer_file import AnswerFile, AnswerRow, steps_there
from megatron_rl.reporting.evaluation import detailed_metrics, evaluation_table
from megatron_rl.reporting.metrics_file import replace_text
from megatron_rl.reporting.sinks import Metrics, metrics_line
from megatron_rl.rewards.build import build_reward
from megatron_rl.rollouts.backends.colocated import LaunchSampler
from megatron_rl.rollouts.environments.turns import needs_reward, turns_of_run
from megatron_rl.rollouts.rows.experience import Response, Responses
from megatron_rl.rollouts.rows.verdicts import excluded_share
from megatron_rl.rollouts.sampling import evaluation_sampling, stop_token_ids
from megatron_rl.run.files import CONFIG, METRICS
from megatron_rl.run.run_record import describe, listed, read_record
from megatron_rl.run.start import STACKS, digest_problem
from megatron_rl.runtime import disk
from megatron_rl.runtime.display import Display, duration
from megatron_rl.runtime.guard import lock
from megatron_rl.runtime.launch import World
from megatron_rl.types import Prompt, Sampling
from megatron_rl.weight_sync.gather import GatherSync

RESPONSES = "responses"
PROMPTS = "prompts"  # of config.json: their fingerprint
# Of a portion of prompts: how often it fills the engines. Between portions they run dry.
_FILLINGS = 8
_ROWS_AT_ONCE = 1024  # responses that rank 0 has whole
logger = logging.getLogger(__name__)


class EvaluationFolder:
    """The folder of an evaluation, touched by rank 0 alone.

    ``config.json`` (settings, as a run has it), ``responses/step_NNNNNN.parquet``,
    ``metrics.jsonl`` (one row a step); ``.lock``, held while an evaluation is at work.

    Attributes:
        pass_at: the k of pass@k, computed from all responses that are there.
    """

    def __init__(self, path: Path, pass_at: Sequence[int]) -> None:
        self.path = path
        self.pass_at = pass_at
        self._rows: dict[int, Metrics] = {}

    def prepare(
        self, record: Mapping[str, Any], weights: Sequence[Weights], launch_id: str
    ) -> list[set[str]]:
        """Takes the folder for this launch; the uids of the prompts that each of ``weights`` has
        answered already.

        Raises:
            ValueError: it cannot be written, is in use, holds something else than an evaluation,
                one with other settings, or answers of other weights of the same step.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock.hold(self.path, launch_id)
        except OSError as error:
            raise ValueError(
                f"--out {self.path}: cannot be written ({error.strerror}: {error.filename}); give a"
                " folder to write into"
            ) from None
        self._refuse_other(record)
        answered = []
        for each in weights:
            file = self.file(each)
            file.check()
            if file.is_whole:
                logger.info("step %d: all its prompts are answered in %s", each.step, file.path)
            answered.append(file.answered())
        with disk.room_for(self.path, 0, "the settings"):
            replace_text(self.path / CONFIG, json.dumps(record, indent=2) + "\n")
        return answered

    def file(self, weights: Weights) -> AnswerFile:
        """The responses of one step."""
        return AnswerFile(self.path / RESPONSES, weights.step, weights.fingerprint)

    def write_metrics(self) -> list[Metrics]:
        """``metrics.jsonl`` of every step whose responses are there; returns its rows."""
        folder = self.path / RESPONSES
        for step, weights in steps_there(folder).items():
            if step not in self._rows:
                scored = AnswerFile(folder, step, weights).scored()
                self._rows[step] = {"step": step, **detailed_metrics(scored, self.pass_at)}
        rows = [self._rows[step] for step in sorted(self._rows)]
        with disk.room_for(self.path, 0, "the metrics"):
            replace_text(self.path / METRICS, "".join(map(metrics_line, rows)))
        return rows

    def _refuse_other(self, record: Mapping[str, Any]) -> None:
        old = read_record(self.path / CONFIG)
        if old is None and not (self.path / METRICS).exists():
            return
        if old is None or PROMPTS not in old:
            raise ValueError(
                f"--out {self.path}: holds something else than an evaluation ({CONFIG} or {METRICS}"
                " of a run); give another folder"
            )
        changes = differences(old, record)
        if changes:
            raise ValueError(
                f"--out {self.path}: holds an evaluation with other settings:{listed(changes)}\nset"
                " these as they were, or give another --out"
            )


def evaluate(
    config: Config, evaluation: Evaluation, prompts_at_a_time: int | None, world: World
) -> str:
    """Collective. Asks what is not answered yet, writes responses and metrics; returns the table.

    Args:
        config: of the evaluation.
        prompts_at_a_time: of a portion, after which responses are on the disk. None: as many as
            fill the engines several times.

    Raises:
        ValueError: something is wrong with the prompts, the model, a checkpoint, or the folder.
    """
    world.watch(config.trainer.stall_limit_s, evaluation.out / STACKS)
    display = Display(shown=world.is_main)
    display.line(f"results go to {evaluation.out}")
    tokenizer = load_tokenizer(config.model.path)
    turns = turns_of_run(config, tokenizer)
    vision = vision_of(config.model.path, config.data)
    with display.phase("reading the prompts"):
        # The training prompts of a run may be gone.
        data = shared_data(config.with_values(data={"train": ()}), world, tokenizer, vision)
        prompts = data.held_out_prompts[: config.evaluation.num_prompts]
        reward = build_reward(config.reward, lambda prompt: prompt.text)
        if needs_reward(turns):
            reward.check(prompts)
    folder = EvaluationFolder(evaluation.out, config.evaluation.pass_at)

    record = describe(config, world.size, None) | {PROMPTS: fingerprint(prompts)}
    answered = world.from_main(lambda: folder.prepare(record, evaluation.weights, world.launch_id))
    pairs = zip(evaluation.weights, answered, strict=True)
    unanswered = [(weights, [p for p in prompts if p.uid not in uids]) for weights, uids in pairs]
    left = [(weights, some) for weights, some in unanswered if some]
    if left:
        multimodal = multimodal_config(prompts, vision)
        engine = build_engine(config, left[0][0], multimodal, world, display)
        evaluation_run = EvaluationRun(
            config=config,
            sampling=evaluation_sampling(config, stop_token_ids(tokenizer.eos_token_id)),
            engine=engine,
            sampler=LaunchSampler(engine, reward, text_of(tokenizer), world, display, turns),
            folder=folder,
            prompts_at_a_time=prompts_at_a_time,
            world=world,
            display=display,
        )
        for weights, some in left:
            evaluation_run.ask(weights, some)
    # Also of what a killed evaluation has left.
    rows = world.from_main(lambda: finished(folder, evaluation.weights))
    return f"{evaluation_table(rows)}\nfinished: {folder.path} ({METRICS}, responses/)"


def build_engine(
    config: Config,
    first: Weights,
    multimodal: MultimodalConfig | None,
    world: World,
    display: Display,
) -> VllmEngine:
    """The engine, once for all weights; reads ``model.path`` only if that is asked first."""
    model = Path(config.model.path)
    awaited = None if first.path == model else world.from_main(lambda: expected_tensors(model))
    with display.phase("building the engine"):
        engine = VllmEngine(
            str(model),
            # Nothing else needs its memory.
            config.rollout.model_copy(update={"sleep_level": 0}),
            seed=config.seed,
            launch_id=world.launch_id,
            multimodal=multimodal,
            expected=awaited,
        )
    world.begin_training()
    return engine


def load_weights(
    config: Config, weights: Weights, engine: VllmEngine, world: World, display: Display
) -> None:
    """Collective. Every rank reads the tensors and gives them to its engine, in place."""
    model = Path(config.model.path)
    if weights.path == model:  # the engine was built with them
        return
    if weights.is_checkpoint and config.checkpoint.verify:
        wrong = digest_problem(world, weights.path)
        if wrong is not None:
            raise ValueError(f"{weights.path}: {wrong}; leave step {weights.step} out by --steps")
    stored = StoredWeights(weights, model, getattr(torch, config.rollout.dtype))
    with display.phase(f"reading the weights of step {weights.step}"):
        GatherSync(stored, engine, config.weight_sync.verify).sync(weights.step)


@dataclass
class EvaluationRun:
    """One engine that is given weights and asked prompts."""

    config: Config
    sampling: Sampling
    engine: VllmEngine
    sampler: LaunchSampler
    folder: EvaluationFolder
    prompts_at_a_time: int | None
    world: World
    display: Display

    def ask(self, weights: Weights, prompts: Sequence[Prompt]) -> None:
        """Collective. The responses of ``weights`` to ``prompts``, portion by portion on the disk.

        A response depends on the seed, its prompt and its number alone, so neither portions nor
        replicas change one (on GPUs as far as kernels do not depend on what is beside it).
        """
        began = monotonic()
        load_weights(self.config, weights, self.engine, self.world, self.display)
        # As many as fill all engines ``_FILLINGS`` times.
        responses = _FILLINGS * self.engine.num_replicas * self.engine.capacity
        size = self.prompts_at_a_time or max(1, responses // self.sampling.num_responses)
        for start in range(0, len(prompts), size):
            portion = prompts[start : start + size]
            end = start + len(portion)
            what = f"step {weights.step}, prompts {start + 1} to {end} of {len(prompts)}"
            answers = self.sampler.run(portion, self.sampling, what)
            # Before they are written, so that the next start asks again.
            excluded_share(answers.scores, self.config.reward.max_excluded_share, what)
            slices = self._slices(weights.step, answers)
            if self.world.is_main:
                self.folder.file(weights).add(slices)
            else:
                deque(slices, maxlen=0)  # gathering is collective
        self.world.from_main(lambda: finished(self.folder, [weights]))
        seconds = duration(monotonic() - began)
        self.display.line(f"step {weights.step}: {len(prompts)} prompts in {seconds}")

    def _slices(self, step: int, responses: Responses) -> Iterator[list[AnswerRow]]:
        """Collective: rows for the file, a slice at a time on rank 0; empty ones elsewhere."""
        for first in range(0, len(responses), _ROWS_AT_ONCE):
            rows = range(first, min(first + _ROWS_AT_ONCE, len(responses)))
            numbered = enumerate(self.sampler.shown(responses, rows) or [], start=first)
            yield [_row(step, row % self.sampling.num_responses, each) for row, each in numbered]


def _row(step: int, number: int, response: Response) -> AnswerRow:
    prompt = response.prompt
    return {
        "step": step,
        "uid": prompt.uid,
        "data_source": prompt.data_source,
        "prompt": prompt.text,
        "answer": prompt.answer,
        "number": number,
        "response": response.text,
        "extracted": response.score.extracted,
        "correct": response.score.correct,
        "reward": response.score.reward,
        "tokens": response.completion.num_sampled,
        "truncated": response.completion.truncated,
        "problem": response.score.problem,
        "categories": prompt.extra.get(CATEGORIES, []),
    }


def finished(folder: EvaluationFolder, weights: Sequence[Weights]) -> list[Metrics]:
    """Their files are whole, the metrics are written; the rows of these."""
    for each in weights:
        folder.file(each).finish()
    return folder.write_metrics()
