"""From a configuration to the source of responses, and to the sampler of its evaluation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatron_rl.config.schema import Config
from megatron_rl.data.loader import PromptLoader, WeightedLoader
from megatron_rl.data.multimodal.vision import VisionProcessor
from megatron_rl.data.reading import Data
from megatron_rl.engine.arguments import served_settings
from megatron_rl.engine.requests import MultimodalConfig, multimodal_config
from megatron_rl.engine.sampling import eos_token_ids
from megatron_rl.engine.serving.client import ServerClient
from megatron_rl.loss import Method
from megatron_rl.policy.megatron_policy import MegatronPolicy
from megatron_rl.protocols import Reward, RolloutEngine, WeightSync
from megatron_rl.rollouts.backends.colocated import ColocatedEngines, Colocation
from megatron_rl.rollouts.backends.failures import RequestTimeouts
from megatron_rl.rollouts.backends.launch import LaunchBackend
from megatron_rl.rollouts.backends.requests import ServerParts
from megatron_rl.rollouts.backends.served import ServerEngines
from megatron_rl.rollouts.backends.servers import ServerBackend
from megatron_rl.rollouts.demonstrations import Demonstrations
from megatron_rl.rollouts.environments.turns import Turns
from megatron_rl.rollouts.hooks.resampling import resampling_of
from megatron_rl.rollouts.jobs import GenerationJob
from megatron_rl.rollouts.logprob_check import LogprobCheck, Scoring, check_sequences
from megatron_rl.rollouts.post_rollout import PostRollout
from megatron_rl.rollouts.prompts import PromptStream
from megatron_rl.rollouts.reward_thread import RewardThread
from megatron_rl.rollouts.rollouts import Rollouts, step_rules
from megatron_rl.rollouts.rows.verdicts import VerdictRules
from megatron_rl.rollouts.sampling import SamplingPlan
from megatron_rl.rollouts.step_record import StepRecord
from megatron_rl.runtime.device import device
from megatron_rl.runtime.display import Display
from megatron_rl.runtime.launch import World
from megatron_rl.runtime.memory import Ledger, memory_in_use
from megatron_rl.runtime.registry import FOLDER, Registry, run_secret
from megatron_rl.types import Sampling, TransferOptions
from megatron_rl.weight_sync.fleet.commands import HttpServer, InFlight, switch_weights
from megatron_rl.weight_sync.fleet.fleet import FleetSync
from megatron_rl.weight_sync.fleet.weight_history import WeightHistory


@dataclass(frozen=True)
class SourceParts:
    """What a source is made of, wherever its engines are."""

    config: Config
    world: World
    display: Display
    policy: MegatronPolicy
    method: Method
    data: Data
    vision: VisionProcessor | None
    loader: PromptLoader | WeightedLoader
    reward: Reward
    decode: Callable[[Sequence[int]], str]
    sampling: Sampling  # of a training step, without its seed
    post: PostRollout
    save: Callable[[int], None]  # leaves a checkpoint of a finished step, unless there is one
    # Where the method trains on responses that prompts bring along.
    demonstrations: Demonstrations | None = None
    turns: Turns | None = None  # None where a response has one

    def job(self) -> GenerationJob:
        """The steps of the run."""
        source, batch, reward = self.config.source, self.config.batch, self.config.reward
        return GenerationJob(
            rules=step_rules(
                self.method,
                batch.prompts_per_step,
                batch.responses_per_prompt,
                staleness=source.staleness,
                lockstep=source.schedule == "lockstep",
                groups_in_flight=source.partial.groups_in_flight,
                max_age=source.partial.max_age,
            ),
            stream=PromptStream(self.loader),
            plan=SamplingPlan(
                self.sampling,
                self.config.seed,
                response_limit=self.config.rollout.response_limit,
                hooks=resampling_of(self.config.rollout_hooks, self.data.train_prompts),
                staleness=source.staleness,
            ),
            wants_group=self.method.wants_group,
            verdicts=VerdictRules(self.method.config.min_group, reward.max_excluded_share),
            demonstrations=self.demonstrations,
        )

    def multimodal(self) -> MultimodalConfig | None:
        """What an engine must know of the images of all prompts; None where there are none."""
        prompts = [*self.data.train_prompts, *self.data.held_out_prompts]
        return multimodal_config(prompts, self.vision)

    def logprob_check(self, engine: Scoring) -> LogprobCheck | None:
        """None where nothing is to be compared."""
        settings = self.config.weight_sync
        if settings.logprob_check_every == 0:
            return None
        image_token = None if self.vision is None else self.vision.image_token_id
        return LogprobCheck(
            partial(self.policy.score_alone, temperature=1.0),
            engine,
            self.world,
            check_sequences(self.data.train_prompts, image_token),
            every=settings.logprob_check_every,
            tolerance=settings.logprob_check_tolerance,
        )


def build_colocated(parts: SourceParts, engine: RolloutEngine, weight_sync: WeightSync) -> Rollouts:
    """``engine``: that of this rank; ``weight_sync``: what brings it weights."""
    world, job = parts.world, parts.job()
    rewards = RewardThread(parts.reward, parts.decode)
    colocation = Colocation(
        parts.policy,
        engine,
        weight_sync,
        parts.config.memory.offload,
        Ledger(lambda: memory_in_use(engine.memory_bytes)),
        parts.logprob_check(engine),
    )
    backend = LaunchBackend(engine, rewards, world, parts.display, parts.turns)
    engines = ColocatedEngines(backend, world, job, colocation)
    return Rollouts(world, parts.policy, engines, job, parts.post)


def build_served(parts: SourceParts) -> Rollouts:
    """Collective. The servers need not be there yet."""
    config, world, job = parts.config, parts.world, parts.job()
    settings = config.weight_sync
    folder = Path(config.run_dir) / FOLDER
    secret = world.from_main(lambda: run_secret(folder))
    # Requests that still wait for servers after an update need the versions before it.
    held = WeightHistory(parts.policy) if job.rules.lockstep and job.rules.staleness > 0 else None
    # What becomes of requests when the weights change; in lockstep none is under way then.
    in_flight: InFlight = "wait" if job.rules.lockstep else "keep"
    fleet = FleetSync(
        held or parts.policy,
        world,
        secret,
        TransferOptions(settings.bucket_mib, settings.rounds_in_flight, settings.verify, cast=True),
        in_flight_requests=in_flight,
        device=device(),
    )
    server_parts = _server_parts(parts, secret, in_flight)
    registry = Registry(folder, settings=served_settings(config.rollout))
    engines = ServerEngines(
        world,
        fleet,
        held,
        lambda saved: ServerBackend(job, server_parts, registry, saved),
        parts.save,
        parts.display,
        job,
        has_turns=parts.turns is not None,
    )
    engines.checks = parts.logprob_check(engines)
    # In lockstep the steps of a run follow from its settings.
    is_recorded = not job.rules.lockstep and config.source.record_gib > 0
    record = StepRecord(config, world.size) if is_recorded else None
    return Rollouts(world, parts.policy, engines, job, parts.post, record)


def _server_parts(parts: SourceParts, secret: str, in_flight: InFlight) -> ServerParts:
    config = parts.config
    in_step = config.batch.prompts_per_step * config.batch.responses_per_prompt

    def switch(url: str, version: int) -> None:
        switch_weights(HttpServer(url, TransferOptions().timeout_s, secret), version, in_flight)

    ends = eos_token_ids(Path(config.model.path))
    multimodal = parts.multimodal()
    return ServerParts(
        connect=lambda url: ServerClient(url, secret, ends, multimodal),
        switch=switch,
        # ``reward.step_timeout_s`` bounds one call: at most a step's responses.
        rewards=lambda wake: RewardThread(parts.reward, parts.decode, at_most=in_step, wake=wake),
        capacity=config.source.requests_per_server,
        timeouts=RequestTimeouts(config.source.request_timeout_factor),
        longest_response=config.rollout.max_response_tokens,
        turns=parts.turns,
    )
