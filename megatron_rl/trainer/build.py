"""The only factory: a checked configuration becomes the parts of a trainer."""

from __future__ import annotations

from functools import partial

from megatron_rl.config.checks import num_optimizer_steps
from megatron_rl.config.schema import Config
from megatron_rl.data.reading import read_data, training_stream
from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.loss import Method
from megatron_rl.policy.megatron_policy import MegatronPolicy
from megatron_rl.protocols import WeightSync
from megatron_rl.rewards.build import build_reward
from megatron_rl.rollout.engine import VllmEngine
from megatron_rl.runtime.display import Display
from megatron_rl.runtime.launch import World
from megatron_rl.runtime.memory import Ledger, memory_in_use
from megatron_rl.runtime.signals import StopRequest
from megatron_rl.trainer.bundle import write_bundle
from megatron_rl.trainer.evaluate import Evaluator
from megatron_rl.trainer.handover import HandOver
from megatron_rl.trainer.health import Health
from megatron_rl.trainer.hooks import RolloutHooks
from megatron_rl.trainer.objective import check_visual_entropy
from megatron_rl.trainer.preflight import check_before_build
from megatron_rl.trainer.rollouts import Generator, Rollouts
from megatron_rl.trainer.run_folder import RunFolder
from megatron_rl.trainer.run_record import data_fingerprint
from megatron_rl.trainer.settings import evaluation_sampling, rollout_sampling, schedule, stop_token_ids
from megatron_rl.trainer.sync import build_canary, build_sync
from megatron_rl.trainer.trainer import Parts, Trainer


def build_trainer(config: Config, world: World, display: Display) -> Trainer:
    """Everything that can be wrong with the input is read before the engines are built, which takes long."""
    stop_requested = StopRequest()  # first of all: a signal during the build must not be lost
    tokenizer = load_tokenizer(config.model.path)
    with display.phase("reading the prompts"):
        data = read_data(config, tokenizer)
        train, held_out = data.train_prompts, data.held_out_prompts
        reward = build_reward(config.reward, lambda prompt: prompt.text)
        reward.check([*train, *held_out])
    method = Method(config.method, response_limit=config.rollout.max_response_tokens)
    if config.batch.responses_per_prompt < method.needs.min_group:
        raise ValueError(
            f"batch.responses_per_prompt = {config.batch.responses_per_prompt}: method {method.name} compares the responses of a prompt "
            f"and needs at least {method.needs.min_group}"
        )
    check_visual_entropy(train, method)
    loader = training_stream(data, config)
    folder = RunFolder(config, world, display)
    start = folder.prepare(data_fingerprint(loader.state()))
    world.from_main(lambda: check_before_build(config, start, method.needs.ref_logprobs))
    with display.phase("building the policy"):
        policy = build_policy(config, keep_reference=method.needs.ref_logprobs)
    with display.phase("building the rollout engine"):
        engine, weight_sync = build_engine(config, world, policy)
    generator = Generator(
        engine, reward, lambda ids: tokenizer.decode(ids, skip_special_tokens=True), world, display
    )
    stop_ids = stop_token_ids(tokenizer.eos_token_id)
    rollouts = Rollouts(
        generator,
        loader,
        method,
        rollout_sampling(config, stop_ids),
        prompts_per_step=config.batch.prompts_per_step,
        share_prompts=config.batch.share_prompts,
        seed=config.seed,
        after_scoring=RolloutHooks(config.rollout_hooks, world),
    )
    evaluator = Evaluator(
        generator, held_out[: config.evaluation.num_prompts], evaluation_sampling(config, stop_ids), config.evaluation.pass_at
    )
    ledger = Ledger(lambda: memory_in_use(engine.memory_bytes), config.memory.alarm_growth_gib)
    parts = Parts(
        policy=policy,
        hand_over=HandOver(
            policy, engine, weight_sync, config.memory.offload, ledger, build_canary(config, policy, engine, world, train)
        ),
        method=method,
        rollouts=rollouts,
        evaluator=evaluator,
        folder=folder,
        world=world,
        stop_requested=stop_requested.__bool__,
        display=display,
        health=Health(config.nonfinite, config.mismatch_alarm, partial(write_bundle, config, world, policy)),
    )
    return Trainer(parts, schedule(config))


def build_policy(config: Config, *, keep_reference: bool) -> MegatronPolicy:
    """Collective. The policy with the weights of ``model.path``."""
    return MegatronPolicy(
        config.model,
        config.parallel,
        config.precision,
        config.optim,
        temperature=config.rollout.temperature,
        keep_reference=keep_reference,
        total_optimizer_steps=num_optimizer_steps(config),
        max_sequence_tokens=config.rollout.max_prompt_tokens + config.rollout.max_response_tokens,
    )


def build_engine(config: Config, world: World, policy: MegatronPolicy) -> tuple[VllmEngine, WeightSync]:
    """The engine takes its memory when it is built: the policy makes room for it as it does in every step, and gets it back."""
    policy.offload(config.memory.offload)
    engine = VllmEngine(config.model.path, config.rollout, seed=config.seed, launch_id=world.launch_id)
    weight_sync = build_sync(config, policy, engine, world)  # before the engine sleeps: a plan looks at its weights
    engine.sleep()
    policy.reload()
    return engine, weight_sync
