"""The only factory: a checked configuration becomes the parts of a trainer."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_rl.config.schema import Config
from megatron_rl.data.loader import PromptLoader
from megatron_rl.data.prompts import load_prompts
from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.loss import Method
from megatron_rl.policy.megatron_policy import MegatronPolicy
from megatron_rl.rewards.build import build_reward
from megatron_rl.rollout.engine import VllmEngine
from megatron_rl.runtime.launch import World
from megatron_rl.runtime.signals import StopRequest
from megatron_rl.trainer.evaluate import Evaluator
from megatron_rl.trainer.rollouts import Generator, Rollouts, sampling_seed
from megatron_rl.trainer.run_folder import RunFolder
from megatron_rl.trainer.trainer import Parts, Schedule, Trainer
from megatron_rl.types import Sampling
from megatron_rl.weight_sync.gather import GatherSync


def build_trainer(config: Config, world: World) -> Trainer:
    """Everything that can be wrong with the input is read before the engines are built, which takes long."""
    tokenizer = load_tokenizer(config.model.path)
    train, held_out = (
        load_prompts(spec, config.data, tokenizer, config.rollout.max_prompt_tokens) for spec in (config.data.train, config.data.eval)
    )
    reward = build_reward(config.reward)
    method = Method(config.method, response_limit=config.rollout.max_response_tokens)
    folder = RunFolder(config, world)
    policy = MegatronPolicy(
        config.model,
        config.parallel,
        config.precision,
        config.optim,
        temperature=config.rollout.temperature,
        keep_reference=method.needs.ref_logprobs,
        total_optimizer_steps=num_optimizer_steps(config),
        max_sequence_tokens=config.rollout.max_prompt_tokens + config.rollout.max_response_tokens,
    )
    engine = VllmEngine(config.model.path, config.rollout, seed=config.seed, launch_id=world.launch_id)
    generator = Generator(engine, reward, lambda ids: tokenizer.decode(ids, skip_special_tokens=True), world)
    stop_ids = stop_token_ids(tokenizer.eos_token_id)
    rollouts = Rollouts(
        generator,
        PromptLoader(train, seed=config.seed, shuffle=config.data.shuffle),
        method,
        rollout_sampling(config, stop_ids),
        prompts_per_step=config.batch.prompts_per_step,
        seed=config.seed,
    )
    evaluator = Evaluator(
        generator, held_out[: config.evaluation.num_prompts], evaluation_sampling(config, stop_ids), config.evaluation.pass_at
    )
    parts = Parts(
        policy=policy,
        engine=engine,
        weight_sync=GatherSync(policy, engine, verify=config.weight_sync.verify),
        method=method,
        rollouts=rollouts,
        evaluator=evaluator,
        folder=folder,
        world=world,
        stop_requested=StopRequest().__bool__,
    )
    return Trainer(parts, schedule(config))


def num_optimizer_steps(config: Config) -> int:
    """Optimizer steps of a whole run, the length of the learning-rate schedule."""
    per_rollout = config.batch.prompts_per_step // config.batch.prompts_per_minibatch
    return config.trainer.num_steps * config.trainer.updates_per_rollout * per_rollout


def schedule(config: Config) -> Schedule:
    return Schedule(
        num_steps=config.trainer.num_steps,
        updates_per_rollout=config.trainer.updates_per_rollout,
        prompts_per_minibatch=config.batch.prompts_per_minibatch,
        tokens_per_microbatch=config.batch.tokens_per_microbatch,
        evaluate_every=config.evaluation.every_steps,
        evaluate_at_start=config.evaluation.at_start,
        evaluate_at_end=config.evaluation.at_end,
        save_every=config.checkpoint.every_steps,
        abort_mismatch_above=config.mismatch_alarm.abort_above,
        seed=config.seed,
    )


def rollout_sampling(config: Config, stop_ids: tuple[int, ...]) -> Sampling:
    rollout = config.rollout
    return Sampling(
        num_responses=config.batch.responses_per_prompt,
        max_response_tokens=rollout.max_response_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        stop_token_ids=stop_ids,
        stop=rollout.stop,
    )


def evaluation_sampling(config: Config, stop_ids: tuple[int, ...]) -> Sampling:
    """The same seed at every evaluation: two evaluations of the same weights give the same answers."""
    evaluation = config.evaluation
    return Sampling(
        num_responses=evaluation.responses_per_prompt,
        max_response_tokens=config.rollout.max_response_tokens,
        temperature=evaluation.temperature,
        top_p=evaluation.top_p,
        seed=sampling_seed(config.seed, 0, 0),
        stop_token_ids=stop_ids,
        stop=config.rollout.stop,
    )


def stop_token_ids(eos: int | Sequence[int] | None) -> tuple[int, ...]:
    if eos is None:
        return ()
    return (eos,) if isinstance(eos, int) else tuple(eos)
