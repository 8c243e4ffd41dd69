"""Keys of other systems with their names here, and what this project does not support."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

# Key here -> last parts of the keys that do the same elsewhere.
_NAMES_ELSEWHERE: Mapping[str, str] = {
    "optim.learning_rate": "lr",
    "batch.responses_per_prompt": "n num_generations",
    "batch.prompts_per_step": "train_batch_size batch_size",
    "batch.prompts_per_minibatch": "mini_batch_size",
    "trainer.num_steps": "max_steps total_steps total_training_steps",
    "trainer.num_epochs": "total_epochs num_train_epochs num_episodes total_episodes",
    "checkpoint.every_steps": "save_freq save_steps",
    "evaluation.every_steps": "test_freq eval_steps",
    "rollout.max_prompt_tokens": "max_prompt_length",
    "rollout.max_response_tokens": "max_response_length max_completion_length max_new_tokens",
    "method.kl.coef": "kl_coef kl_loss_coef",
    "run_dir": "output_dir default_local_dir",
    "data.train": "train_files",
    "data.eval": "val_files",
    "model.path": "model_name_or_path",
    "model.lora.rank": "lora_rank lora_r",
    "model.lora.alpha": "lora_alpha",
    "model.lora.targets": "target_modules",
    "model.lora.path": "lora_adapter_path adapter_path",
    "parallel.tensor": "tensor_model_parallel_size",
    "rollout.tensor": "tensor_parallel_size",
    "parallel.pipeline": "pipeline_model_parallel_size",
    "optim.clip_grad": "max_grad_norm",
    "optim.warmup_steps": "warmup_ratio",
    # The latter ones of these five are their former names.
    "logging.trackers": "report_to logger wandb tensorboard",
    "logging.project": "project_name wandb_project",
    "logging.run_name": "experiment_name wandb_name",
    "logging.group": "wandb_group",
    "logging.tags": "wandb_tags",
    "logging.job_type": "wandb_job_type",
    "hub.push": "push_to_hub hub_model_id",
    "source.request_timeout_factor": "give_up_factor",  # its former name
}
NAMES_HERE: Mapping[str, str] = {
    name: key for key, names in _NAMES_ELSEWHERE.items() for name in names.split()
}

# Words of a key (between dots and underscores) -> what to say. README has the same list.
NOT_SUPPORTED = (
    (r"q_?lora|dora", "QLoRA and DoRA are not supported: see model.lora"),
    (r"(lora_)?dropout", "dropout is not supported: what samples has none, and is the policy"),
    (
        r"mcp|multi_?turns?|agents?|environments?",
        "MCP servers and agents of other programs are not supported: tools and several turns are,"
        " see env",
    ),
    (r"videos?|audio", "video and audio are not supported: prompts are texts and images"),
    (
        r"critics?|value_(model|loss|head|function)|gae|vf_coef|ppo",
        "a critic (PPO, GAE) is not supported: advantages come from groups, see method",
    ),
    (
        r"prm|process_reward",
        "process rewards are not supported: a reward is of a whole response, see reward",
    ),
    (
        r"dpo|kto|orpo|simpo",
        "preference losses are not supported: rewards are verifiable ones",
    ),
    (r"fsdp2?|deepspeed|zero", "FSDP and DeepSpeed are not supported: see parallel"),
    (r"sglang|tensorrt|trtllm", "rollout engines other than vLLM are not supported"),
    (
        r"load_in_(4|8)bit|bnb|bitsandbytes|gptq|awq|qat",
        "quantized weights are not supported: FP8 layers are, see precision",
    ),
)


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
