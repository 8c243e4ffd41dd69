"""Keys of other systems with their names here, and what this project does not support."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

# Last part of a key elsewhere -> the key here.
NAMES_HERE: Mapping[str, str] = {
    "lr": "optim.learning_rate",
    "n": "batch.responses_per_prompt",
    "num_generations": "batch.responses_per_prompt",
    "train_batch_size": "batch.prompts_per_step",
    "batch_size": "batch.prompts_per_step",
    "mini_batch_size": "batch.prompts_per_minibatch",
    "max_steps": "trainer.num_steps",
    "total_steps": "trainer.num_steps",
    "total_training_steps": "trainer.num_steps",
    "num_epochs": "trainer.num_steps",
    "total_epochs": "trainer.num_steps",
    "num_train_epochs": "trainer.num_steps",
    "save_freq": "checkpoint.every_steps",
    "save_steps": "checkpoint.every_steps",
    "test_freq": "evaluation.every_steps",
    "eval_steps": "evaluation.every_steps",
    "max_prompt_length": "rollout.max_prompt_tokens",
    "max_response_length": "rollout.max_response_tokens",
    "max_completion_length": "rollout.max_response_tokens",
    "max_new_tokens": "rollout.max_response_tokens",
    "kl_coef": "method.kl.coef",
    "kl_loss_coef": "method.kl.coef",
    "output_dir": "run_dir",
    "default_local_dir": "run_dir",
    "train_files": "data.train",
    "val_files": "data.eval",
    "model_name_or_path": "model.path",
    "tensor_model_parallel_size": "parallel.tensor",
    "tensor_parallel_size": "rollout.tensor",
    "pipeline_model_parallel_size": "parallel.pipeline",
    "max_grad_norm": "optim.clip_grad",
    "warmup_ratio": "optim.warmup_steps",
    "project_name": "logging.wandb_project",
    # Former names of keys of this package.
    "give_up_factor": "source.request_timeout_factor",
}

# Words of a key (between dots and underscores) -> what to say. README has the same list.
NOT_SUPPORTED = (
    (r"q?lora|peft|dora|adapters?", "adapters (LoRA) are not supported: all weights are trained"),
    (
        r"tools?|multi_?turns?|turns|agents?|env|environment",
        "tools and several turns are not supported: one prompt, one response, one reward",
    ),
    (
        r"videos?|audio",
        "video and audio are not supported: prompts are texts and images",
    ),
    (
        r"critics?|value_(model|loss|head|function)|gae|vf_coef|ppo",
        "a critic (PPO, GAE) is not supported: advantages come from groups, see method",
    ),
    (
        r"reward_model|rm|judge|prm|process_reward",
        "reward models are not supported: rewards come from verifiers, see reward.verifier",
    ),
    (
        r"dpo|kto|orpo|sft|distill|distillation|teacher",
        "SFT, preference losses and distillation are not supported: rewards are verifiable ones",
    ),
    (
        r"fsdp2?|deepspeed|zero",
        "FSDP and DeepSpeed are not supported: the policy is Megatron-Core, see parallel",
    ),
    (r"sglang|tensorrt|trtllm", "rollout engines other than vLLM are not supported"),
    (
        r"load_in_(4|8)bit|bnb|bitsandbytes|gptq|awq|qat",
        "quantized weights are not supported: FP8 layers are, see precision",
    ),
    (
        r"hub|push_to_hub|hub_model_id",
        "the model hub is not supported: model.path and <run_dir>/export are local folders",
    ),
)


def name_here(key: str) -> str | None:
    """The key here that does what a key of another system does, by its last part.

    Example: ``optim.lr`` is ``optim.learning_rate``.
    """
    return NAMES_HERE.get(key.rsplit(".", 1)[-1])


def not_supported(key: str, value: Any = None) -> str | None:
    """A sentence where a dotted ``key``, or one below it in ``value``, is of what is not supported.

    Example: ``not_supported("model.lora_rank")`` begins with ``adapters (LoRA) are not supported``.
    """
    for candidate in [key, *_keys_below(value)]:
        for words, sentence in NOT_SUPPORTED:
            if re.search(rf"(^|[._])({words})($|[._])", candidate, re.IGNORECASE):
                return sentence
    return None


def _keys_below(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield str(key)
            yield from _keys_below(inner)
