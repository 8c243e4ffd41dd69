"""Which settings go with a source of rollouts, and with a warm start."""

from collections.abc import Iterator

from megatron_rl.config.data_names import data_problems
from megatron_rl.config.schema import Config
from megatron_rl.config.sections import EnvironmentConfig
from megatron_rl.hooks import ROLLOUT_HOOKS

# The keys of env that one environment and no other reads; a plug-in may read any.
_READ = {
    "single": (),
    "tools": ("tools", "corpus", "servers", "tool_parser"),
    "agent": ("tools", "agent", "tool_parser"),
}
_OF_ONE = ("tools", "corpus", "servers", "agent", "tool_parser")


def source_problems(config: Config) -> Iterator[str]:
    """What does not go together, one sentence each: key, value, remedy."""
    yield from _truncated(config)
    yield from _router_replay(config)
    yield from _hinted(config)
    for name in config.rollout_hooks:
        if ROLLOUT_HOOKS[name].changes_temperature:
            why = f"rollout_hooks.{name}: samples at other temperatures than rollout.temperature"
            yield from _with_old_tokens(config, why, f"leave {name} out")
        is_filtered = config.method.filters.dynamic_sampling is not None
        if ROLLOUT_HOOKS[name].for_unsolved and is_filtered:
            yield (
                f"rollout_hooks.{name}: method.filters.dynamic_sampling refuses the groups that are"
                " all wrong; set it to null"
            )
    yield from _unread(config.env)
    if config.rollout.anneal.schedule is not None:
        yield from _with_annealing(config)
    if config.source.is_partial:
        yield from _with_partial(config)
    if config.source.is_servers:
        yield from _with_servers(config)
    elif config.source.staleness:
        yield (
            f"source.staleness = {config.source.staleness}: colocated engines always sample with"
            " the newest weights; set it to 0, or source=servers"
        )


def _hinted(config: Config) -> Iterator[str]:
    """Problems of solutions, which only the hook ghpo reads, and of what does not go with it."""
    column, ratios = config.data.columns.solution, list(config.data.hint_ratios)
    key = "rollout_hooks.ghpo"
    if "ghpo" not in config.rollout_hooks:
        if column is not None:
            yield (
                f"data.columns.solution = {column}: only {key} reads it; set {key}={{}}, or leave"
                " it out"
            )
        return
    if column is None:
        yield f"{key}: shows parts of solutions; name their column, data.columns.solution"
    if not ratios or ratios != sorted(set(ratios)):
        yield f"data.hint_ratios = {ratios}: {key} wants one share or more; let them grow"
    hooks = [name for name in config.rollout_hooks if ROLLOUT_HOOKS[name].resamples]
    others = ", ".join(name for name in hooks if name != "ghpo")
    reasons = {
        f"rollout_hooks.{others}": others
        and "takes hinted prompts for those of the data; leave one of them out",
        f"env.name = {config.env.name}": config.env.name != "single"
        and "has turns, which hints are not built for; set env=single",
        f"source.schedule = {config.source.schedule}": config.source.schedule == "free"
        and "records steps by the prompts of the data; set it to lockstep",
    }
    for other, reason in reasons.items():
        if reason:
            yield f"{key}: {other} {reason}"


def _unread(env: EnvironmentConfig) -> Iterator[str]:
    """Keys that the environment would not read."""
    for key in sorted({*_OF_ONE} - {*_READ.get(env.name, _OF_ONE)}):
        if getattr(env, key):
            readers = ", ".join(name for name, keys in _READ.items() if key in keys)
            yield (
                f"env.{key} = {getattr(env, key)}: is not read with env.name = {env.name}; leave it"
                f" out, or set env to one of {readers}"
            )


def _truncated(config: Config) -> Iterator[str]:
    """Training alone: ``evaluation.top_p`` is free, since nothing is trained on its responses."""
    rollout = config.rollout
    if not rollout.is_truncated:
        return
    key = f"rollout.top_p = {rollout.top_p:g}, rollout.top_k = {rollout.top_k}"
    off = "set rollout.top_p=1.0 rollout.top_k=-1 (evaluation.top_p may stay)"
    if rollout.top_k < 1:
        yield (
            f"{key}: the tokens that the sampler keeps travel with every token, and only top_k"
            f" bounds them (4 bytes each); set rollout.top_k=100 or another bound, or {off}"
        )
    # What joins, cuts or records responses without their kept tokens.
    others = {
        "source.schedule = free": config.source.schedule == "free",
        "source.partial.groups_in_flight": config.source.is_partial,
    }
    for other, is_on in others.items():
        if is_on:
            yield (
                f"{key}: with {other} responses come without the tokens that the sampler has kept,"
                " so the policy cannot be divided by their mass, as the sampler is, and every"
                f" importance ratio would be off by it; {off}"
            )


def _router_replay(config: Config) -> Iterator[str]:
    """Experts of the rollout: what vLLM does not return them with."""
    rollout = config.rollout
    if rollout.router_replay != "rollout":
        return
    source = config.source
    reasons = {
        f"rollout.pipeline = {rollout.pipeline}": rollout.pipeline > 1
        and "no stage of the engine has those of all layers; set it to 1",
        "rollout.enable_prefix_caching = false": not rollout.enable_prefix_caching
        and "vLLM keeps them with its prefix cache; set it to true",
        "source.schedule = free": source.schedule == "free"
        and "the record of the steps has none; set source.schedule=lockstep",
        "source.partial.groups_in_flight": (source.is_partial and source.is_servers)
        and "a server returns them with a response that has ended; leave it out",
    }
    for key, reason in reasons.items():
        if reason:
            yield f"{key}: with rollout.router_replay = rollout {reason}, or replay old_policy"


def _with_servers(config: Config) -> Iterator[str]:
    staleness = config.source.staleness
    if staleness:
        age = f"source.staleness = {staleness}: responses may be so many updates old"
        yield from _with_old_tokens(config, age, "source.staleness=0")
    if config.source.schedule == "free" and not staleness:
        yield (
            "source.schedule = free: with source.staleness = 0 every response is of the newest"
            " weights in any case; set it to lockstep, or raise source.staleness"
        )
    if config.weight_sync.method == "gather":
        yield "weight_sync.method = gather: servers take weights by a plan; set it to auto"
    if config.rollout.quantization is not None:
        yield (
            f"rollout.quantization = {config.rollout.quantization}: servers take weights in the"
            " format they keep them in; set it to null"
        )
    if config.memory.offload:
        yield (
            f"memory.offload = {list(config.memory.offload)}: policy and servers share no device,"
            " so nothing leaves it; set it to []"
        )


def _with_old_tokens(config: Config, age: str, without: str) -> Iterator[str]:
    """``age``: why tokens may be old; ``without``: the setting under which they are not."""
    if not config.method.weighs_sampler:
        key, kind = config.method.correction
        cap = f"{key.partition('.')[0]}.cap"
        yield (
            f"{age}, which method.{key} = {kind} does not correct; set method.{key}=tis"
            f" method.{cap}=2.0 (truncated importance sampling), icepop, or {without}"
        )
    if config.mismatch_limits.abort_above is not None:
        yield (
            f"mismatch_limits.abort_above = {config.mismatch_limits.abort_above:g}: {age}, so"
            " sampler and trainer differ on purpose; set it to null"
        )


def _with_annealing(config: Config) -> Iterator[str]:
    anneal = config.rollout.anneal
    key = f"rollout.anneal.start = {anneal.start:g}"
    if config.rollout.temperature != 1.0:
        yield (
            f"rollout.temperature = {config.rollout.temperature:g}: {key} says the temperatures of"
            " a response; set rollout.temperature=1.0, or rollout.anneal.start=null"
        )
    if anneal.start is not None and anneal.end > anneal.start:
        yield f"rollout.anneal.end = {anneal.end:g}: is above {key}, and must not be; lower it"
    if anneal.decay_limit < anneal.decay_tokens:
        yield (
            f"rollout.anneal.decay_limit = {anneal.decay_limit:g}: less than"
            f" rollout.anneal.decay_tokens = {anneal.decay_tokens:g}, with which step 1 begins;"
            " raise it"
        )
    if config.source.is_partial and anneal.decay_growth:
        yield (
            f"rollout.anneal.decay_growth = {anneal.decay_growth:g}: with source.partial a response"
            " has tokens of several steps, hence of several schedules, and the logprobs of the"
            " policy are defined by one; set it to 0"
        )
    for name in config.rollout_hooks:
        if ROLLOUT_HOOKS[name].changes_temperature:
            yield (
                f"rollout_hooks.{name}: defines the temperature of the tokens of a response, and so"
                f" does {key}: one token cannot have two; leave {name} out, or set"
                " rollout.anneal.start=null"
            )
    if anneal.policy == "plain":
        why = "rollout.anneal.policy = plain: tokens are sampled at other temperatures than 1"
        yield from _with_old_tokens(config, why, "rollout.anneal.policy=annealed")


def _with_partial(config: Config) -> Iterator[str]:
    groups = config.source.partial.groups_in_flight
    assert groups is not None
    key = f"source.partial.groups_in_flight = {groups}"
    per_step = config.batch.prompts_per_step
    if not per_step <= groups <= 2 * per_step:
        yield (
            f"{key}: give at least batch.prompts_per_step = {per_step}, which a step takes, and at"
            f" most {2 * per_step}: else more groups may reach source.partial.max_age at a time"
            " than a step trains; null switches it off"
        )
    if config.source.schedule == "free":
        yield (
            f"{key}: where a step ends is a number of tokens, so that it does not depend on timing;"
            " with source.schedule = free the weights of each token do; set it to lockstep"
        )
    age = f"{key}: tokens may be source.partial.max_age = {config.source.partial.max_age} updates"
    yield from _with_old_tokens(config, f"{age} old", "source.partial.groups_in_flight=null")
    if config.rollout.stop:
        yield (
            f"rollout.stop = {list(config.rollout.stop)}: {key} cuts responses anywhere, and a stop"
            " string that begins in one step and ends in the next would not be seen; set it to []"
        )


def warm_start_problems(config: Config, data_ranks: int) -> Iterator[str]:
    """One sentence for everything that does not fit: key, value, remedy. ``data_ranks``: of the
    policy."""
    warm = config.warm_start
    key = f"warm_start.steps = {warm.steps}"
    if (warm.data is None) != (warm.steps == 0):
        yield (
            f"{key}, warm_start.data = {warm.data}: one needs the other; give rows of prompts and"
            " responses and the steps that train on them, or 0 and null"
        )
    if warm.data is None or warm.steps == 0:
        return
    yield from data_problems("warm_start.data", warm.data)
    num_steps = config.trainer.num_steps
    if num_steps is not None and warm.steps > num_steps:
        yield f"{key}: they are the first of trainer.num_steps = {num_steps}; lower it"
    if warm.rows_per_step < data_ranks:
        yield (
            f"warm_start.rows_per_step = {warm.rows_per_step}: fewer than the {data_ranks}"
            " data-parallel ranks; raise it"
        )
    if (
        warm.peak_learning_rate is not None
        and warm.peak_learning_rate < config.optim.min_learning_rate
    ):
        yield (
            f"warm_start.peak_learning_rate = {warm.peak_learning_rate:g}: below"
            f" optim.min_learning_rate = {config.optim.min_learning_rate:g}; raise it"
        )
    if config.source.is_servers:
        yield (
            f"{key}: servers sample ahead of the policy, which no supervised step waits for; train"
            " these steps in a run of their own (experiment=warm_start) and give its export as"
            " model.path"
        )
    kl = config.method.kl
    if config.model.lora.rank is not None and (kl.in_loss or kl.in_reward):
        yield (
            f"{key}: the reference of adapters is the model without them, as it was before these"
            " steps; set method.kl.coef=0, or train them in a run of their own (experiment="
            "warm_start) and give its export as model.path"
        )
