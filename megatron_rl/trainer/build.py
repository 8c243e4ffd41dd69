"""The only factory: a checked configuration becomes the parts of a trainer."""

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from megatron_rl.config.rules.checks import num_optimizer_steps
from megatron_rl.config.schema import Config
from megatron_rl.data.loader import PromptLoader
from megatron_rl.data.multimodal.vision import VisionProcessor, vision_of
from megatron_rl.data.reading import Data, training_stream, with_steps
from megatron_rl.data.shared import shared_data
from megatron_rl.data.tokenizer import load_tokenizer, text_of
from megatron_rl.engine.engine import VllmEngine
from megatron_rl.engine.requests import MultimodalConfig
from megatron_rl.engine.weights.recorder import UndiscoveredError
from megatron_rl.engine.weights.stream import expected_tensors
from megatron_rl.evaluation.evaluator import build_evaluator
from megatron_rl.hooks import ROLLOUT_HOOKS
from megatron_rl.loss import Method
from megatron_rl.models.experts import expert_width
from megatron_rl.policy.megatron_policy import MegatronPolicy
from megatron_rl.policy.settings import PolicySettings
from megatron_rl.protocols import WeightSync
from megatron_rl.rewards.build import build_reward
from megatron_rl.rollouts.build import SourceParts, build_colocated, build_served
from megatron_rl.rollouts.demonstrations import (
    KEY,
    Demonstrations,
    check_demonstrations,
    encoder,
    put_aside,
)
from megatron_rl.rollouts.environments.turns import needs_reward, turns_of_run
from megatron_rl.rollouts.hooks.rollout_hooks import RolloutHooks
from megatron_rl.rollouts.post_rollout import PostRollout
from megatron_rl.rollouts.rollouts import Rollouts
from megatron_rl.rollouts.rows.exchange import on_main
from megatron_rl.rollouts.sampling import rollout_sampling, stop_token_ids
from megatron_rl.run.preflight import check_before_build
from megatron_rl.run.run_folder import RunFolder
from megatron_rl.run.run_record import data_fingerprint
from megatron_rl.run.start import LOGS
from megatron_rl.runtime.device import device, make_deterministic
from megatron_rl.runtime.display import Display
from megatron_rl.runtime.guard.signals import noted_stop
from megatron_rl.runtime.launch import World, log_to_file
from megatron_rl.runtime.profiling import Profiler
from megatron_rl.signals import Signals, SignalSetup, signals_of
from megatron_rl.trainer.bundle import write_bundle
from megatron_rl.trainer.health import Health
from megatron_rl.trainer.learner import Learner, MinibatchPlan
from megatron_rl.trainer.placement import Placement
from megatron_rl.trainer.trainer import Trainer
from megatron_rl.trainer.warm_start import (
    GivenRows,
    WarmStart,
    WarmStartLearner,
    given_prompts,
    samples,
    supervised,
)
from megatron_rl.types import TransferOptions
from megatron_rl.weight_sync.gather import GatherSync
from megatron_rl.weight_sync.reshard import ReshardSync

logger = logging.getLogger(__name__)


def build_trainer(config: Config, world: World, display: Display) -> Trainer:
    """Collective. Reads all input that can be wrong before it builds policy and engine."""
    stop_requested = noted_stop()  # first of all: a signal during the build must not be lost
    tokenizer = load_tokenizer(config.model.path)
    turns = turns_of_run(config, tokenizer)
    with display.phase("reading the prompts", name="prompts"):
        vision = vision_of(config.model.path, config.data)
        data, given = read_prompts(config, world, tokenizer, vision)
        config = with_steps(config, data)
        reward = build_reward(config.reward, lambda prompt: prompt.text)
        if needs_reward(turns):
            reward.check([*data.train_prompts, *data.held_out_prompts])
    method, signals = build_method(config, data)
    stop_ids = stop_token_ids(tokenizer.eos_token_id)
    data, demonstrations = build_demonstrations(config, method, data, tokenizer, world)
    folder = RunFolder(config, world, display, signals)
    start = folder.prepare(data_fingerprint(training_stream(data, config).state()))
    if config.logging.rank_files and not world.is_main:
        log_to_file(Path(config.run_dir) / LOGS, world.rank, world.launch_id)
    world.from_main(lambda: check_before_build(config, start, signals.needs("ref")))
    with display.phase("preparing what the method reads", announced=False):
        setup = SignalSetup(Path(config.model.path), Path(config.run_dir), vision, world)
        data = signals.prepare(data, setup)
    loader = training_stream(data, config)
    with display.phase("building the policy", name="policy"):
        policy = build_policy(config, signals, vision, read_weights=start.checkpoint is None)
    decode = text_of(tokenizer)
    parts = SourceParts(
        config=config,
        world=world,
        display=display,
        policy=policy,
        method=method,
        data=data,
        vision=vision,
        loader=loader,
        reward=reward,
        decode=decode,
        sampling=rollout_sampling(config, stop_ids, signals.num_likely, expert_width(policy.arch)),
        post=build_post_rollout(config, world, folder, decode),
        demonstrations=demonstrations,
        turns=turns,
        save=lambda step: folder.save_unless_there(step, policy, source),
    )
    rollouts = build_served(parts) if config.source.is_servers else build_with_engines(parts)
    learner = build_learner(config, world, policy, method, signals)
    source, learner = after_warm_start(config, given, policy, rollouts, learner)
    profile = config.profile
    return Trainer(
        config=config.trainer,
        source=source,
        learner=learner,
        evaluator=build_evaluator(config, rollouts, data, method, stop_ids),
        folder=folder,
        world=world,
        display=display,
        profiler=Profiler(profile.steps, profile.kind, folder.path / "profile", world.rank),
        stop_requested=stop_requested,
    )


def build_with_engines(parts: SourceParts) -> Rollouts:
    """Collective. Engines in the processes of the policy."""
    multimodal = parts.multimodal()
    with parts.display.phase("building the rollout engine", name="engine"):
        engine, weight_sync = build_engine(parts.config, parts.world, parts.policy, multimodal)
    return build_colocated(parts, engine, weight_sync)


def build_method(config: Config, data: Data) -> tuple[Method, Signals]:
    """The method of the run, and the signals that give what it reads.

    Raises:
        ValueError: the groups are too small for it, or what it reads cannot be given.
    """
    method = Method(config.method, response_limit=config.rollout.max_response_tokens)
    if config.batch.responses_per_prompt < config.method.min_group:
        raise ValueError(
            f"batch.responses_per_prompt = {config.batch.responses_per_prompt}: method"
            f" {method.name} compares the responses of a prompt and needs at least"
            f" {config.method.min_group}"
        )
    signals = signals_of(method, config.seed)
    signals.check(data.train_prompts, config)
    fits = all(signal.over_turns for signal in signals.members) and not method.reads_token_ids
    if config.env.has_turns and not fits:
        raise ValueError(
            f"env.name = {config.env.name}: method = {method.name} reads"
            f" {', '.join(method.reads) or 'the token ids of responses'}, which is not built for"
            " several turns; choose a method that does not (grpo, dapo, rloo), or env=single"
        )
    return method, signals


def build_demonstrations(
    config: Config, method: Method, data: Data, tokenizer: PreTrainedTokenizerBase, world: World
) -> tuple[Data, Demonstrations | None]:
    """Collective. The demonstrations that prompts bring along, or that hooks remember; None where
    the method reads none. In the returned data they are set aside where a hook hands them out.

    Raises:
        ValueError: one is invalid, see ``check_demonstrations``, or hooks give responses and the
            method does not tell them from sampled ones.
    """
    hooks = {name: ROLLOUT_HOOKS[name] for name in config.rollout_hooks}
    giving = [name for name, hook in hooks.items() if hook.remembers or hook.on_demand]
    if "is_demonstration" not in method.reads:
        if giving:
            raise ValueError(
                f"rollout_hooks.{giving[0]}: gives responses that are not sampled, which method ="
                f" {method.name} does not tell from sampled ones; choose one that does"
                " (method=ar3po, method=exgrpo, method=ampo)"
            )
        return data, None
    encode = encoder(tokenizer)
    limits = (config.batch.responses_per_prompt, config.rollout.max_response_tokens)
    on_demand = any(hook.on_demand for hook in hooks.values())
    if on_demand or not giving or any(KEY in prompt.extra for prompt in data.train_prompts):
        world.from_main(lambda: check_demonstrations(data.train_prompts, encode, *limits))
    if on_demand:
        aside = [put_aside(prompt, encode) for prompt in data.train_prompts]
        data = replace(data, train_prompts=aside)
    return data, Demonstrations(encode)


def read_prompts(
    config: Config, world: World, tokenizer: PreTrainedTokenizerBase, vision: VisionProcessor | None
) -> tuple[Data, GivenRows | None]:
    """Collective. The prompts of a run, and the rows of its warm start that are not held out. In a
    run that samples nothing these rows are the training prompts, and ``data.train`` is not read.

    Raises:
        ValueError: as ``read_data`` and ``given_prompts``, on every rank.
    """
    is_sampling = samples(config)
    read = config if is_sampling else config.with_values(data={"train": ()})
    data = shared_data(read, world, tokenizer, vision)
    if not config.warm_start.steps:
        return data, None
    encode = encoder(tokenizer)
    rows = shared_data(supervised(config), world, tokenizer, vision).train_prompts
    held_out = data.held_out_prompts if config.data.drop_eval_overlap else ()
    prompts = given_prompts(rows, held_out, encode, config.rollout.max_response_tokens)
    loader = PromptLoader(prompts, seed=config.seed, shuffle=config.data.shuffle)
    warm, temperature = config.warm_start, config.rollout.temperature
    given = GivenRows(prompts, loader, encode, warm.rows_per_step, temperature, world)
    return data if is_sampling else replace(data, train_prompts=prompts), given


def build_post_rollout(
    config: Config, world: World, folder: RunFolder, decode: Callable[[Sequence[int]], str]
) -> PostRollout:
    chosen = config.rollout_hooks.items()
    hooks = {name: knobs for name, knobs in chosen if not ROLLOUT_HOOKS[name].resamples}
    return PostRollout(
        shown=partial(on_main, decode=decode, world=world),
        # None without hooks: rank 0 then gathers no tokens but those it trains on and logs.
        after_scoring=RolloutHooks(hooks, world) if hooks else None,
        log_samples=folder.log_samples,
        num_samples=config.logging.log_samples,
    )


def build_policy(
    config: Config,
    signals: Signals,
    vision: VisionProcessor | None = None,
    read_weights: bool = True,
) -> MegatronPolicy:
    """Collective. The policy, with the weights of ``model.path`` or those a checkpoint brings."""
    if not read_weights:
        logger.info("policy: the weights are those of the checkpoint, the model is not read")
    settings = policy_settings(config, signals, vision, read_weights)
    if config.trainer.deterministic:
        make_deterministic(os.environ)
    return MegatronPolicy(config.model, config.parallel, config.precision, config.optim, settings)


def policy_settings(
    config: Config,
    signals: Signals,
    vision: VisionProcessor | None = None,
    read_weights: bool = True,
) -> PolicySettings:
    rollout = config.rollout
    longest = rollout.max_prompt_tokens + rollout.max_response_tokens
    # Counts plain sequences: half the limit where a method adds a second sequence per response.
    plain_tokens = config.batch.tokens_per_microbatch // config.method.sequences_per_response
    return PolicySettings(
        temperature=rollout.temperature,
        keep_reference=signals.needs("ref"),
        total_optimizer_steps=num_optimizer_steps(config),
        max_sequence_tokens=longest + signals.extra_tokens,
        tokens_per_microbatch=plain_tokens,
        share_prompts=config.batch.share_prompts,
        image_processor=vision,
        read_weights=read_weights,
        warm_start_steps=config.warm_start.steps,
        warm_start_rate=config.warm_start.peak_learning_rate,
    )


def build_learner(
    config: Config, world: World, policy: MegatronPolicy, method: Method, signals: Signals
) -> Learner:
    fp8 = config.precision.fp8
    write = partial(write_bundle, config, world, policy)
    return Learner(
        policy=policy,
        method=method,
        signals=signals,
        health=Health(config.nonfinite, config.mismatch_limits, write),
        plan=MinibatchPlan(
            prompts_per_minibatch=config.batch.prompts_per_minibatch,
            epochs_per_rollout=config.trainer.epochs_per_rollout,
            seed=config.seed,
        ),
        placement=Placement(policy.batching, world),
        update_matches_score=fp8 is None or fp8.logprobs == "same",
        records_experts=config.rollout.router_replay == "old_policy",
        teachers=policy.teachers,
    )


def after_warm_start(
    config: Config,
    given: GivenRows | None,
    policy: MegatronPolicy,
    rollouts: Rollouts,
    learner: Learner,
) -> tuple[Rollouts | WarmStart, Learner | WarmStartLearner]:
    """``rollouts`` and ``learner``, preceded by supervised steps on ``given`` unless it is None."""
    if given is None:
        return rollouts, learner
    steps = config.warm_start.steps
    config = supervised(config)
    method = Method(config.method)
    first = build_learner(config, given.world, policy, method, signals_of(method))
    source = WarmStart(rollouts, given, steps)
    return source, WarmStartLearner(first, learner, steps, policy.renew_reference)


def build_engine(
    config: Config, world: World, policy: MegatronPolicy, multimodal: MultimodalConfig | None = None
) -> tuple[VllmEngine, WeightSync]:
    """Collective. The engine takes its memory when it is built, so the policy is offloaded first
    and reloaded afterwards, as in every step."""
    policy.offload(config.memory.offload)
    engine = VllmEngine(
        config.model.path,
        config.rollout,
        seed=config.seed,
        launch_id=world.launch_id,
        multimodal=multimodal,
        expected=world.from_main(lambda: expected_tensors(Path(config.model.path))),
    )
    # Before the engine sleeps: planning the sync reads its weights.
    weight_sync = build_sync(config, policy, engine, world)
    engine.sleep()
    policy.reload()
    return engine, weight_sync


def build_sync(
    config: Config, policy: MegatronPolicy, engine: VllmEngine, world: World
) -> WeightSync:
    """Collective. Gather or reshard, see ``Config.sync_method``; the plan of reshard is made here,
    and its cost is logged.

    Raises:
        ValueError: policy and engine do not fit each other, or reshard was asked for and vLLM's
            loader of this model cannot be recorded.
    """
    settings = config.weight_sync
    gather = GatherSync(policy, engine, verify=settings.verify)
    if config.sync_method == "gather":
        return gather
    problem = ""
    try:
        engine.weight_shards()
    except UndiscoveredError as error:
        problem = str(error)
    problems = [text for text in world.all_gather(problem) if text]
    if problems:
        if settings.method == "reshard":
            raise ValueError(
                f"weight_sync.method = reshard: {problems[0]}; set weight_sync.method=gather"
            )
        if world.is_main:
            logger.info("weight sync: weight_sync.method = auto is gather here: %s", problems[0])
        return gather
    options = TransferOptions(
        settings.bucket_mib, settings.rounds_in_flight, settings.verify, cast=True
    )
    sync = ReshardSync(policy, engine, options, gpus_per_node=world.local_size, device=device())
    if world.is_main:
        plan = sync.plan
        sizes = (plan.bytes_sent, plan.bytes_by_link["across_nodes"], plan.bytes_local)
        logger.info(
            "weight sync: each sync sends %.1f MiB between processes, %.1f of them across nodes,"
            " both the least possible, and copies %.1f MiB inside them",
            *(size / 2**20 for size in sizes),
        )
    return sync
