"""From a configuration to the source of responses, and to the sampler of its evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron_rl.config.schema import Config
from megatron_rl.data.loader import PromptLoader, WeightedLoader
from megatron_rl.data.multimodal.vision import VisionProcessor
from megatron_rl.data.reading import Data
from megatron_rl.engine.arguments import served_settings
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
from megatron_rl.protocols import Reward, RolloutEngine, WeightSource, WeightSync
from megatron_rl.rollouts.backends.colocated import ColocatedEngines, LaunchEngines
from megatron_rl.rollouts.backends.colocation import Colocation
from megatron_rl.rollouts.backends.launch import LaunchBackend
from megatron_rl.rollouts.backends.served import ServedParts, ServerEngines
from megatron_rl.rollouts.backends.server_parts import ServerParts
from megatron_rl.rollouts.backends.servers import ServerBackend
from megatron_rl.rollouts.backends.timeouts import RequestTimeouts
from megatron_rl.rollouts.demonstrations import Demonstrations
from megatron_rl.rollouts.hooks.resampling import resampling_of
from megatron_rl.rollouts.jobs import TrainingJob
from megatron_rl.rollouts.logprob_check import LogprobCheck, Scoring, check_sequences
from megatron_rl.rollouts.post_rollout import PostRollout
from megatron_rl.rollouts.prompts import PromptStream
from megatron_rl.rollouts.reward_thread import RewardThread
from megatron_rl.rollouts.rollouts import Rollouts, source_rules
from megatron_rl.rollouts.rows.verdicts import VerdictRules
from megatron_rl.rollouts.sampling import SamplingPlan
from megatron_rl.rollouts.step_record import StepRecord
from megatron_rl.runtime.device import device
from megatron_rl.runtime.display import Display
from megatron_rl.runtime.launch import World
from megatron_rl.runtime.registry import FOLDER, Registry, run_secret
from megatron_rl.types import Sampling, TransferOptions
from megatron_rl.weight_sync.fleet.commands import HttpServer, InFlight, switch_weights
from megatron_rl.weight_sync.fleet.fleet import FleetSync
from megatron_rl.weight_sync.fleet.weight_history import WeightHistory


@dataclass(frozen=True)
class SourceParts:
    """What a source is made of, wherever its engines are.

    Attributes:
        weights: The policy's.
        decode: Tokens to text.
        sampling: Of a training step, without its seed.
        post: What follows when a step has its responses.
        save: Leaves a checkpoint of a finished step, unless there is one.
        demonstrations: Where the method trains on responses that prompts bring along.
    """

    policy: MegatronPolicy
    weights: WeightSource
    method: Method
    data: Data
    vision: VisionProcessor | None
    loader: PromptLoader | WeightedLoader
    reward: Reward
    decode: Callable[[Sequence[int]], str]
    sampling: Sampling
    post: PostRollout
    save: Callable[[int], None]
    demonstrations: Demonstrations | None = None

    def job(self, config: Config) -> TrainingJob:
        """The steps of the run."""
        plan = SamplingPlan(
            self.sampling,
            config.seed,
            response_limit=config.rollout.response_limit,
            hooks=resampling_of(config.rollout_hooks, self.data.train_prompts),
            staleness=config.source.staleness,
        )
        return TrainingJob(
            rules=source_rules(self.method, config.batch, config.source),
            stream=PromptStream(self.loader),
            plan=plan,
            wants_group=self.method.wants_group,
            verdicts=VerdictRules(self.method.config.min_group, config.reward.max_excluded_share),
            demonstrations=self.demonstrations,
        )


def build_colocated(
    config: Config,
    world: World,
    display: Display,
    parts: SourceParts,
    engines: tuple[RolloutEngine, WeightSync, Colocation],
) -> Rollouts:
    """``engines``: the engine of this rank, what brings it weights, and its turns with the
    policy."""
    engine, weight_sync, colocation = engines
    job = parts.job(config)
    backend = LaunchBackend(engine, RewardThread(parts.reward, parts.decode), world, display)
    launch = LaunchEngines(backend, world, job)
    return Rollouts(
        world=world,
        engines=ColocatedEngines(launch, parts.policy, engine, weight_sync, colocation),
        job=job,
        post=parts.post,
    )


def build_served(config: Config, world: World, display: Display, parts: SourceParts) -> Rollouts:
    """Collective. The servers need not be there yet."""
    folder = Path(config.run_dir) / FOLDER
    secret = world.from_main(lambda: run_secret(folder))
    job = parts.job(config)
    rules = job.rules
    # What waits for servers when the policy has changed is of the versions before.
    held = WeightHistory(parts.weights) if rules.lockstep and rules.staleness else None
    server_parts = _server_parts(config, parts, secret)

    def backend(saved: Mapping[str, Any] | None) -> ServerBackend:
        registry = Registry(folder, settings=served_settings(config.rollout))
        return ServerBackend(job, server_parts, registry, saved)

    served = ServedParts(
        world=world,
        policy=parts.policy,
        fleet=_fleet(config, world, held or parts.weights, secret),
        held=held,
        backend=backend,
        save=parts.save,
        display=display,
    )
    engines = ServerEngines(served, job)
    engines.checks = build_logprob_check(config, world, parts, engines)
    # In lockstep the steps of a run follow from its settings.
    is_recorded = not rules.lockstep and config.source.record_gib > 0
    record = StepRecord(config, world.size) if is_recorded else None
    return Rollouts(world=world, engines=engines, job=job, post=parts.post, record=record)


def _server_parts(config: Config, parts: SourceParts, secret: str) -> ServerParts:
    in_step = config.batch.prompts_per_step * config.batch.responses_per_prompt
    return ServerParts(
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
        # ``reward.step_timeout_s`` bounds one call: at most a step's responses.
        rewards=lambda wake: RewardThread(parts.reward, parts.decode, at_most=in_step, wake=wake),
        capacity=config.source.requests_per_server,
        timeouts=RequestTimeouts(config.source.give_up_factor),
        longest_response=config.rollout.max_response_tokens,
    )


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
