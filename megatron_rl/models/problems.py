"""What of the settings of a run does not suit its model: key, value, remedy."""

from collections.abc import Iterator

from megatron_rl.config.rules.layout_rules import stage_layers
from megatron_rl.config.schema import ModelConfig, ParallelConfig, PrecisionConfig
from megatron_rl.models.base import Architecture


def family_problems(
    arch: Architecture, model: ModelConfig, parallel: ParallelConfig, precision: PrecisionConfig
) -> list[str]:
    """What of the settings does not suit the model, adapters aside."""
    problems = []
    for there, what in (
        (arch.latent, "latent attention"),
        (arch.vision, "vision-language models"),
        (arch.biased, "GPT-OSS"),
        (arch.output_norms, "norms behind attention"),
        (arch.linear, "linear attention"),
    ):
        if there and precision.fp8 is not None:
            problems.append(
                f"precision.fp8.recipe = {precision.fp8.recipe}: FP8 has not been tried with"
                f" {what}; set precision=bf16"
            )
    if arch.biased and parallel.expert_tensor > 1:
        problems.append(
            f"parallel.expert_tensor = {parallel.expert_tensor}: megatron-core does not cut experts"
            " that have biases; set it to 1, and parallel.expert higher"
        )
    if arch.heads_norm and parallel.tensor > arch.num_kv_heads:
        problems.append(
            f"parallel.tensor = {parallel.tensor}: ranks that share a key-value head would count it"
            f" twice in a norm over all heads; set it to at most {arch.num_kv_heads}"
        )
    if arch.vision is not None and arch.vision.num_deep:
        problems += _deep_problems(arch, arch.vision.num_deep, parallel)
    if arch.vision is None and model.freeze_vision:
        problems.append(
            f"model.freeze_vision = True: a model of family {arch.family} has no tower; set it to"
            " false"
        )
    return problems


def _deep_problems(arch: Architecture, num_deep: int, parallel: ParallelConfig) -> Iterator[str]:
    """The tower is on the first stage, and its features are no arguments of a layer."""
    if parallel.recompute == "full":
        yield (
            "parallel.recompute = full: a layer that is run again would lack the features of images"
            " that this model adds behind it; set selective or none"
        )
    first = stage_layers(arch, parallel)[0] // (parallel.virtual_pipeline or 1)
    if first < num_deep:
        yield (
            f"parallel.pipeline = {parallel.pipeline}: the first stage begins with {first} layers,"
            f" and this model adds features of images behind the first {num_deep}; lower it, or"
            " raise parallel.first_stage_layers"
        )


def adapter_problems(
    arch: Architecture, model: ModelConfig, parallel: ParallelConfig, precision: PrecisionConfig
) -> list[str]:
    """What does not go with adapters."""
    if model.lora.rank is None:
        if model.lora.path is None:
            return []
        return [
            f"model.lora.path = {model.lora.path}: without model.lora.rank it would have no effect;"
            " set the rank to that of adapter_config.json"
        ]
    start = f"model.lora.rank = {model.lora.rank}: "
    problems = []
    if arch.num_experts and "mlp" in model.lora.targets:
        problems.append(
            f"{start}adapters of experts are not implemented; set model.lora.targets=[attention]"
        )
    if precision.fp8 is not None:
        problems.append(
            f"{start}adapters of weights in FP8 are not implemented; set precision=bf16"
        )
    if "attention" in model.lora.targets and arch.num_kv_heads % parallel.tensor:
        problems.append(
            f"{start}tensor ranks that share a key-value head are not implemented; lower"
            f" parallel.tensor = {parallel.tensor} to a divisor of {arch.num_kv_heads}, or set"
            " model.lora.targets=[mlp]"
        )
    return problems
