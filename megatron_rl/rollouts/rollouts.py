"""Prompts in, scored responses out: what a step asks ``streaming`` for, and what it makes of the
answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np

from megatron_rl.config.schema import Config
from megatron_rl.data.loader import Ahead, PromptLoader, WeightedLoader
from megatron_rl.data.token_rows import RowNumbers
from megatron_rl.loss import Method
from megatron_rl.protocols import Answers, Reward
from megatron_rl.rollouts.annealed import sampling_of_step
from megatron_rl.rollouts.dispatch import Order, Outcome
from megatron_rl.rollouts.exchange import on_main, token_rows
from megatron_rl.rollouts.experience import (
    Experience,
    Response,
    Responses,
)
from megatron_rl.rollouts.judge import Judge
from megatron_rl.rollouts.metrics import Clock
from megatron_rl.rollouts.resampling import Resampled, Resampling
from megatron_rl.rollouts.step_end import StepEnd
from megatron_rl.rollouts.streaming import Streaming
from megatron_rl.runtime.display import Display
from megatron_rl.runtime.launch import World
from megatron_rl.scheduling.batches import KeptShare, Rules
from megatron_rl.scheduling.work import Request
from megatron_rl.types import Prompt, Sampling


@dataclass(frozen=True)
class Sampled:
    """Scored responses, what else is known of their generation, and the seconds that ``rollout``
    and ``reward`` took."""

    responses: Responses
    outcome: Outcome
    seconds: Mapping[str, float]


class Sampler:
    """Generates and scores; the trainer and the evaluator share it."""

    def __init__(
        self,
        engine: Answers,
        reward: Reward,
        decode: Callable[[Sequence[int]], str],
        world: World,
        display: Display,
    ) -> None:
        self.world = world
        self.streaming = Streaming(engine, Judge(reward, decode), world, display)
        self._engine = engine
        self._decode = decode

    @property
    def weight_version(self) -> int:
        """Of the weights that the engine samples with."""
        return self._engine.weight_version

    def run(self, prompts: Sequence[Prompt], sampling: Sampling, what: str) -> Responses:
        """Collective. ``sampling.num_responses`` scored responses for each prompt. ``what`` names
        this generation where its progress is shown."""
        return self.ask(prompts, sampling, what, Clock())

    def ask(
        self, prompts: Sequence[Prompt], sampling: Sampling, what: str, clock: Clock
    ) -> Responses:
        """``run``, and adds the seconds that ``rollout`` and ``reward`` took."""
        rules = Rules(len(prompts), sampling.num_responses)
        sampled = self.sample(Order(rules, prompts.__getitem__, sampling, what))
        clock.add(sampled.seconds)
        return sampled.responses

    def sample(self, order: Order) -> Sampled:
        """Collective. The scored responses of the groups that ``order`` wants; tokens stay on the
        first rank of the replica that sampled them."""
        clock = Clock()
        outcome, replica = self.streaming.run(order, clock)
        leaders = self.streaming.leaders
        holders = leaders[np.asarray(outcome.replicas, dtype=np.int64)]
        here = np.flatnonzero(holders == self.world.rank)
        names = list(product(outcome.groups, range(order.rules.responses_per_group)))
        completions = [replica.completions[Request(0, *names[row])] for row in here]
        responses = Responses(
            prompts=[order.prompts(group) for group, _ in names],
            group_ids=np.repeat(np.arange(len(outcome.groups)), order.rules.responses_per_group),
            lengths=np.asarray(outcome.lengths, dtype=np.int64),
            truncated=np.asarray(outcome.truncated, dtype=bool),
            weight_versions=np.asarray(outcome.weight_versions, dtype=np.int64),
            scores=outcome.scores,
            tokens=token_rows(here, completions),
            holders=holders,
        )
        return Sampled(responses, outcome, clock.seconds)

    def shown(self, responses: Responses, rows: RowNumbers) -> list[Response] | None:
        """Collective: see ``exchange.on_main``."""
        return on_main(responses, rows, self._decode, self.world)


@dataclass(frozen=True)
class Rollouts:
    """The responses of a step, by the newest weights: every rank samples, then every rank trains.

    ``sampling`` is that of a training step; its seed is replaced in every round of generation.
    """

    sampler: Sampler
    loader: PromptLoader | WeightedLoader
    method: Method
    sampling: Sampling
    prompts_per_step: int
    seed: int
    end: StepEnd
    response_limit: Callable[[int], int] | None = None  # by step; None: that of ``sampling``
    # Of dynamic sampling: says how many prompts are sampled ahead, and changes no response.
    kept_share: KeptShare = field(default_factory=KeptShare)
    resampling: Resampling | None = None

    def collect(self, step: int) -> Experience:
        """The responses of one training step. Under dynamic sampling (DAPO, 2503.14476 eq 11) these
        are the first groups, in the order of the prompts, that the method wants; so many prompts
        are looked at that there are enough, up to a limit. What was found by then is used.

        Some responses are logged, also when none was wanted: whatever stops the run in this step,
        they show what the policy answered.

        Raises:
            ValueError: no group was wanted, or a rollout hook failed.
        """
        prompts = Ahead(self.loader)
        order = self._order(step, prompts)
        sampled = self.sampler.sample(order)
        outcome = sampled.outcome
        prompts.keep(outcome.end)
        clock = Clock()
        clock.add(sampled.seconds)
        responses = sampled.responses
        if not outcome.num_wanted:
            self.end.log(step, responses)
            some = " (samples.jsonl has some of the last)"
            raise ValueError(none_wanted(step, outcome.num_refused, some))
        again: Resampled | None = None
        if self.resampling is not None:
            seed = sampling_seed(self.seed, step)
            again = self.resampling.run(self.sampler, step, seed, responses, clock)
            responses = again.responses
        experience = replace(
            self.end(step, responses, clock),
            discarded_groups=outcome.num_refused,
            tries=-(-outcome.end // self.prompts_per_step),
            unused_tokens=outcome.unused_tokens,
            annealing=order.sampling.annealing,
        )
        return experience if again is None else again.noted_in(experience)

    def _order(self, step: int, prompts: Ahead) -> Order:
        num_responses = self.sampling.num_responses
        sampling = sampling_of_step(self.sampling, step)
        sampling = replace(sampling, seed=sampling_seed(self.seed, step))
        if self.response_limit is not None:
            sampling = replace(sampling, max_response_tokens=self.response_limit(step))
        return Order(
            rules=step_rules(self.method, self.prompts_per_step, num_responses),
            prompts=prompts,
            sampling=sampling,
            what=f"step {step}",
            wants=self.method.wants_group,
            kept_share=self.kept_share,
            changed=None if self.resampling is None else self.resampling.sampling_of,
        )

    def state(self) -> dict[str, Any]:
        """The position in the prompts, and what sampling hooks remember."""
        state = self.loader.state()
        return state if self.resampling is None else state | {"hooks": self.resampling.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Raises ValueError when the state belongs to other prompts or another source."""
        if "open_groups" in state:
            raise ValueError(
                "resume: the checkpoint is of a run with source.partial; go on with the source of"
                " that run, or start with resume=never in a new run_dir"
            )
        self.loader.restore(state)
        if self.resampling is not None:
            self.resampling.restore(state.get("hooks", {}))


def step_rules(method: Method, prompts_per_step: int, responses_per_prompt: int) -> Rules:
    """Which groups a step trains, of responses by its own weights."""
    needs = method.needs
    limit = needs.max_sampling_tries * prompts_per_step if needs.dynamic_sampling else None
    return Rules(prompts_per_step, responses_per_prompt, limit)


def none_wanted(step: int, num_refused: int, where: str = "") -> str:
    """What is said when dynamic sampling leaves a step nothing; ``where``: one can look."""
    return (
        f"dynamic sampling: all {num_refused} groups of step {step} were entirely right or entirely"
        f" wrong{where}; use easier or harder prompts, raise"
        " method.filters.dynamic_sampling.max_tries or switch it off (null)"
    )


def sampling_seed(seed: int, step: int) -> int:
    """A distinct seed for each step (32 bits); evaluation uses step 0 only."""
    return (seed * 1_000_003 + step * 1_009) % 2**32


def rollout_sampling(config: Config, stop_ids: tuple[int, ...]) -> Sampling:
    """How a training step samples."""
    rollout = config.rollout
    return Sampling(
        num_responses=config.batch.responses_per_prompt,
        max_response_tokens=rollout.max_response_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        stop_token_ids=stop_ids,
        stop=rollout.stop,
        annealing=rollout.anneal.schedule,
    )


def evaluation_sampling(config: Config, stop_ids: tuple[int, ...]) -> Sampling:
    """The same seed at every evaluation: two evaluations of the same weights give the same
    answers."""
    evaluation = config.evaluation
    return Sampling(
        num_responses=evaluation.responses_per_prompt,
        max_response_tokens=config.rollout.max_response_tokens,
        temperature=evaluation.temperature,
        top_p=evaluation.top_p,
        seed=sampling_seed(config.seed, 0),
        stop_token_ids=stop_ids,
        stop=config.rollout.stop,
    )


def stop_token_ids(eos: int | Sequence[int] | None) -> tuple[int, ...]:
    """Token ids that end a response, from ``eos_token_id`` of a tokenizer."""
    if eos is None:
        return ()
    return (eos,) if isinstance(eos, int) else tuple(eos)
