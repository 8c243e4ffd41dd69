"""A warm start: supervised steps before those of the rollouts. Where their responses come from, and
who learns from them."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron_rl.annealing import Annealing
from megatron_rl.config.method import load_method
from megatron_rl.config.schema import Config
from megatron_rl.data.loader import PromptLoader
from megatron_rl.data.prompts import without_overlap
from megatron_rl.protocols import Policy
from megatron_rl.rollouts.demonstrations import DEMONSTRATED, Encode, demonstration
from megatron_rl.rollouts.rollouts import Rollouts
from megatron_rl.rollouts.rows.exchange import token_rows
from megatron_rl.rollouts.rows.experience import Experience, Responses, experience_of
from megatron_rl.runtime.launch import World
from megatron_rl.trainer.learner import Learner
from megatron_rl.types import Prompt, Score, SyncReport

logger = logging.getLogger(__name__)
_UNJUDGED = Score(0.0, False, problem="given, not sampled")
_PLAIN = Annealing(1.0, 1.0, decay_tokens=1.0, plain_tokens=0)  # temperature 1 everywhere
# Metrics of a supervised step. It has no rewards, ratios or sampler, so the others are dropped.
_MEANINGFUL = ("loss/", "optim/", "rollout/entropy")


def supervised(config: Config) -> Config:
    """``config`` for supervised steps: the rows of the warm start as training data, the response in
    place of the answer, and the method ``sft``."""
    warm = config.warm_start
    assert warm.data is not None
    roles = {"prompt": warm.prompt, "answer": warm.response, "choices": None, "solution": None}
    rows = {
        "train": warm.data,
        "train_weights": None,
        "eval": (),  # it has other columns
        "answer_after": None,
        "columns": config.data.columns.model_copy(update=roles),
    }
    sizes = {
        "prompts_per_step": warm.rows_per_step,
        "prompts_per_minibatch": warm.rows_per_step,
        "responses_per_prompt": 1,
    }
    changed = config.with_values(
        data=rows, batch=sizes, trainer={"epochs_per_rollout": 1}, rollout={"router_replay": "none"}
    )
    return changed.model_copy(update={"method": load_method("sft").config})


def samples(config: Config) -> bool:
    """Whether any step trains on what engines sample."""
    num_steps = config.trainer.num_steps
    return num_steps is None or config.warm_start.steps < num_steps


def given_prompts(
    prompts: Sequence[Prompt], held_out: Sequence[Prompt], encode: Encode, max_response_tokens: int
) -> list[Prompt]:
    """The rows whose prompt is not held out; their ``answer`` is the response to learn.

    Raises:
        ValueError: a response is too long, or no row is left.
    """
    kept = without_overlap(prompts, held_out)
    if len(kept) < len(prompts):
        logger.info("warm_start.data: %d rows also in data.eval dropped", len(prompts) - len(kept))
    if not kept:
        raise ValueError(
            f"warm_start.data: every one of its {len(prompts)} prompts is also in data.eval; give"
            " other data, or data.drop_eval_overlap=false"
        )
    lengths = {prompt.uid: len(encode(prompt.answer)) for prompt in kept}
    long = [uid for uid, length in lengths.items() if length > max_response_tokens]
    if long:
        raise ValueError(
            f"warm_start.data: {len(long)} of {len(kept)} responses are longer than"
            f" rollout.max_response_tokens = {max_response_tokens}, such as that of {long[0]} with"
            f" {lengths[long[0]]} tokens; drop these rows, or raise that"
        )
    return kept


@dataclass(frozen=True)
class GivenRows:
    """The rows of the supervised steps."""

    prompts: Sequence[Prompt]  # their ``answer`` is the response
    loader: PromptLoader  # of these
    encode: Encode  # from the text of a response to its tokens, with an end token
    per_step: int
    temperature: float  # of the policy. What is learned is the model at temperature 1.
    world: World

    def next(self) -> Experience:
        """The next rows; every rank tokenizes all, and holds its share until they are placed."""
        prompts = self.loader.take(self.per_step)
        given = [demonstration(self.encode(prompt.answer)) for prompt in prompts]
        numbers = np.arange(len(prompts))
        holders = numbers % self.world.size
        here = np.flatnonzero(holders == self.world.rank)
        responses = Responses(
            prompts=prompts,
            group_ids=numbers,
            lengths=np.array([len(one.token_ids) for one in given], dtype=np.int64),
            truncated=np.zeros(len(given), dtype=bool),
            weight_versions=np.full(len(given), DEMONSTRATED),
            scores=[_UNJUDGED] * len(given),
            tokens=token_rows(here, [given[row] for row in here]),
            holders=holders,
        )
        annealing = None if self.temperature == 1 else _PLAIN
        return replace(experience_of(responses), annealing=annealing)


class WarmStart:
    """Implements ``protocols.RolloutSource``: given rows up to step ``steps``, then ``rollouts``.

    Weights of supervised steps reach the engines before these generate, and after the last step.
    """

    def __init__(self, rollouts: Rollouts, given: GivenRows, steps: int) -> None:
        self.rollouts = rollouts
        self.given = given
        self.steps = steps
        self._unpublished: int | None = None
        self._has_sampled = False

    def next(self, step: int) -> Experience:
        """See protocols.RolloutSource, as are the other methods."""
        if step <= self.steps:
            return self.given.next()
        self._has_sampled = True
        return self.rollouts.next(step)

    def training(self) -> AbstractContextManager[None]:
        return self.rollouts.training()

    @contextmanager
    def generation(self) -> Iterator[None]:
        if self._unpublished is not None:
            self.rollouts.publish(self._unpublished)
            self._unpublished = None
        with self.rollouts.generation():
            yield

    def publish(self, version: int) -> SyncReport:
        if version >= self.steps:
            self._unpublished = None
            return self.rollouts.publish(version)
        self.rollouts.policy.check_weights(version)
        self._unpublished = version
        return SyncReport(version, num_tensors=0, bytes_sent=0, bytes_total=0, seconds=0.0)

    def state(self) -> dict[str, Any]:
        # Before the first sampled step this would make a scheduler that begins at step 1.
        sampled = self.rollouts.state() if self._has_sampled else {}
        return {**sampled, "warm_start": self.given.loader.state()}

    def restore(self, state: dict[str, Any]) -> None:
        sampled = dict(state)
        position: Mapping[str, Any] | None = sampled.pop("warm_start", None)
        if position is not None:  # else the checkpoint is of a run without a warm start
            self.given.loader.restore(position)
        self._has_sampled = bool(sampled)
        if sampled:
            self.rollouts.restore(sampled)


@dataclass(frozen=True)
class WarmStartLearner:
    """The learner of a run with a warm start: ``first`` up to step ``steps``, then ``after``. At
    the end of the warm start ``renew_reference`` makes its result the reference of later steps."""

    first: Learner
    after: Learner
    steps: int
    renew_reference: Callable[[], None]

    @property
    def policy(self) -> Policy:
        return self.after.policy

    def score(self, experience: Experience) -> Experience:
        learner = self.first if experience.step <= self.steps else self.after
        return learner.score(experience)

    def update(self, step: int, experience: Experience) -> dict[str, float]:
        if step > self.steps:
            return self.after.update(step, experience)
        metrics = self.first.update(step, experience)
        if step == self.steps:
            self.renew_reference()
        return {key: value for key, value in metrics.items() if key.startswith(_MEANINGFUL)}
