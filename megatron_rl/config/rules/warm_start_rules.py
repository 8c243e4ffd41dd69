"""Which settings go with a warm start."""

from collections.abc import Iterator

from megatron_rl.config.data_names import data_problems
from megatron_rl.config.schema import Config


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
