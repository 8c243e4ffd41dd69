"""From a configuration with ``source=servers`` to its source and the sampler of its evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron_rl.config.schema import Config
from megatron_rl.data.loader import PromptLoader, WeightedLoader
from megatron_rl.data.multimodal.vision import VisionProcessor
from megatron_rl.data.reading import Data
from megatron_rl.engine.requests import multimodal_config
from megatron_rl.engine.sampling import eos_token_ids
from megatron_rl.engine.serving.client import (
    RequestFailedError,
    ServerClient,
    ServerLostError,
    ServerUnreachableError,
)
from megatron_rl.loss import Method
from megatron_rl.policy.megatron_policy import MegatronPolicy
from megatron_rl.protocols import Reward, WeightSource
from megatron_rl.rollouts.judge import verdicts
from megatron_rl.rollouts.logprob_check import LogprobCheck, Scoring, check_sequences
from megatron_rl.rollouts.patience import Patience
from megatron_rl.rollouts.prompt_stream import PromptStream
from megatron_rl.rollouts.resampling import Resampling
from megatron_rl.rollouts.rollouts import step_rules
from megatron_rl.rollouts.server_dispatch import ServerDispatcher
from megatron_rl.rollouts.server_sampling import ServerSampling
from megatron_rl.rollouts.server_tasks import Tasks
from megatron_rl.rollouts.servers import ServerParts, Servers
from megatron_rl.rollouts.step_end import StepEnd
from megatron_rl.rollouts.step_record import StepRecord
from megatron_rl.runtime.device import device
from megatron_rl.runtime.display import Display
from megatron_rl.runtime.launch import World
from megatron_rl.runtime.registry import FOLDER, Registry, run_secret
from megatron_rl.scheduling.batches import Rules
from megatron_rl.types import Completion, Prompt, Sampling, Score, TransferOptions
from megatron_rl.weight_sync.fleet.commands import HttpServer, InFlight, switch_weights
from megatron_rl.weight_sync.fleet.fleet import FleetSync
from megatron_rl.weight_sync.fleet.weight_history import WeightHistory


@dataclass(frozen=True)
class SourceParts:
    """What a source is made of, wherever its engines are. ``weights``: the policy's; ``decode``:
    tokens to text; ``sampling``: of a training step, without its seed; ``end``: what follows when a
    step has its responses; ``save``: leaves a checkpoint of a finished step, unless there is
    one; ``resampling``: the sampling hooks, None: there are none; ``encode``: text to tokens, where
    the method trains on responses that prompts carry."""

    policy: MegatronPolicy
    weights: WeightSource
    method: Method
    data: Data
    vision: VisionProcessor | None
    loader: PromptLoader | WeightedLoader
    reward: Reward
    decode: Callable[[Sequence[int]], str]
    sampling: Sampling
    end: StepEnd
    save: Callable[[int], None]
    resampling: Resampling | None = None
    encode: Callable[[str], Sequence[int]] | None = None

    def judge(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Score]:
        """The verdicts on answers, each to the prompt at its place."""
        return verdicts(self.reward, self.decode, prompts, completions)

    def wants(self, scores: Sequence[Score]) -> bool:
        """Whether the method learns from a group with these verdicts."""
        return self.method.wants_group([score.correct for score in scores])


def build_servers(config: Config, world: World, display: Display, parts: SourceParts) -> Servers:
    """Collective. The servers need not be there yet."""
    folder = Path(config.run_dir) / FOLDER
    secret = world.from_main(lambda: run_secret(folder))
    sampling = ServerSampling(config, parts.sampling, parts.resampling)
    tasks = Tasks(
        prompts=PromptStream(parts.loader),
        sampling=sampling,
        judge=parts.judge,
        wants=parts.wants,
        connect=partial(
            ServerClient,
            secret=secret,
            eos_token_ids=eos_token_ids(Path(config.model.path)),
            multimodal=multimodal_config(
                [*parts.data.train_prompts, *parts.data.held_out_prompts], parts.vision
            ),
        ),
        lost=ServerLostError,
        unreachable=ServerUnreachableError,
        failed=RequestFailedError,
        switch=partial(_switch, secret, _in_flight(config)),
        capacity=config.source.requests_per_server,
        patience=Patience(config.source.give_up_factor),
        longest_response=config.rollout.max_response_tokens,
    )
    rules = source_rules(config, parts.method)
    # What waits for servers when the policy has changed is of the versions before.
    held = WeightHistory(parts.weights) if rules.lockstep and rules.staleness else None
    # In lockstep the steps of a run follow from its settings.
    is_recorded = not rules.lockstep and config.source.record_gib > 0

    def dispatcher(saved: Mapping[str, Any] | None) -> ServerDispatcher:
        return ServerDispatcher(rules, tasks, Registry(folder), saved)

    source = Servers(
        ServerParts(
            world=world,
            policy=parts.policy,
            fleet=_fleet(config, world, held or parts.weights, secret),
            held=held,
            dispatcher=dispatcher,
            prompts=tasks.prompts,
            sampling=sampling,
            end=parts.end,
            save=parts.save,
            staleness=config.source.staleness,
            display=display,
            record=StepRecord(config, world.size) if is_recorded else None,
        )
    )
    source.checks = build_logprob_check(config, world, parts, source)
    return source


def _fleet(config: Config, world: World, weights: WeightSource, secret: str) -> FleetSync:
    settings = config.weight_sync
    return FleetSync(
        weights,
        world,
        secret,
        TransferOptions(settings.bucket_mib, settings.rounds_in_flight, settings.verify, cast=True),
        in_flight_requests=_in_flight(config),
        device=device(),
    )


def _in_flight(config: Config) -> InFlight:
    """What becomes of requests when the weights change. In lockstep none is under way then."""
    return "wait" if config.source.schedule == "lockstep" else "keep"


def _switch(secret: str, in_flight: InFlight, url: str, version: int) -> None:
    """The server goes over to staged weights."""
    switch_weights(HttpServer(url, TransferOptions().timeout_s, secret), version, in_flight)


def build_logprob_check(
    config: Config, world: World, parts: SourceParts, engine: Scoring
) -> LogprobCheck | None:
    """None where nothing is to be compared."""
    settings = config.weight_sync
    if settings.logprob_check_every == 0:
        return None
    image_token = None if parts.vision is None else parts.vision.image_token_id
    return LogprobCheck(
        partial(parts.policy.score_alone, temperature=1.0),
        engine,
        world,
        check_sequences(parts.data.train_prompts, image_token),
        every=settings.logprob_check_every,
        tolerance=settings.logprob_check_tolerance,
    )


def source_rules(config: Config, method: Method) -> Rules:
    """Which groups a step trains, and how old they may be."""
    batch = config.batch
    return replace(
        step_rules(method, batch.prompts_per_step, batch.responses_per_prompt),
        staleness=config.source.staleness,
        lockstep=config.source.schedule == "lockstep",
    )
