"""Advantages, loss and gradient beside those of TRL's own GRPOTrainer, where trl is installed: one
model in float64, one batch of responses, and the overrides that tools/translate_config.py prints
for TRL's arguments. Old weights sampled the responses, the loss is of newer ones, so that clips
bind."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from megatron_rl.config.method import load_method
from megatron_rl.loss import ResponseBatch, TokenBatch
from tests.zoo import save_tiny_model
from tools.translate_config import translate

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("default")]  # of trl itself

GROUP, LIMIT = 4, 16
# Of three prompts: parts of a reward, one right answer, all right.
REWARDS = [0.0, 0.25, 0.5, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0]
LENGTHS = [1, 3, 7, 16, 2, 5, 11, 4, 6, 9, 1, 8]
PROMPT = [7, 8, 9]
# Where the loss is k2 here: the gradient is the same, the value is not.
ON_POLICY = "grpo with its KL, on policy"
PLAIN_KL = {"beta": 0.04, "use_bias_correction_kl": False}
CORRECTED = {"vllm_importance_sampling_correction": True, "vllm_importance_sampling_cap": 1.5}
CASES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "grpo with KL": {"loss_type": "grpo", **PLAIN_KL},
    ON_POLICY: {"loss_type": "grpo", "beta": 0.04},
    "bnpo": {"loss_type": "bnpo"},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "dapo, its defaults": {},
    "dapo, clip higher": {"epsilon_high": 0.28, **PLAIN_KL},
    "dapo, two-sided clip": {"delta": 1.25},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.02},
    "gspo, token mean": {"importance_sampling_level": "sequence", **PLAIN_KL},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon": 0.02},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.1},
    "sapo": {"loss_type": "sapo", **PLAIN_KL},
    "tis": {"vllm_importance_sampling_mode": "token_truncate", **CORRECTED},
}


class Compared(NamedTuple):
    """What one side makes of the batch: advantages (responses), loss, gradient (all parameters)."""

    advantages: Tensor
    loss: Tensor
    gradient: Tensor


def responses() -> list[list[int]]:
    draw = torch.Generator().manual_seed(3)
    return [torch.randint(10, 120, (n,), generator=draw).tolist() for n in LENGTHS]


def moved(model: PreTrainedModel, scale: float, seed: int) -> None:
    """Adds noise to the weights."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += scale * torch.randn(parameter.shape, generator=draw, dtype=torch.float64)


def updated(model: PreTrainedModel, name: str) -> None:
    """The weights of the loss: other ones than sampled, but on policy."""
    if name != ON_POLICY:
        moved(model, 0.02, seed=1)


def gradient(model: PreTrainedModel) -> Tensor:
    grads = [parameter.grad for parameter in model.parameters()]
    return torch.cat([grad.flatten() for grad in grads if grad is not None])


def sampled_logprobs(model: PreTrainedModel) -> list[Tensor]:
    """Of the sampler, which is not quite the policy."""
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        exact = logprobs(model).split(LENGTHS)
    return [part + 0.4 * torch.randn(part.shape, generator=draw).double() for part in exact]


def logprobs(model: PreTrainedModel) -> Tensor:
    """Of all response tokens, one response after another; each is a sequence of its own."""
    parts = []
    for ids in responses():
        logits = model(input_ids=torch.tensor([PROMPT + ids])).logits[0, len(PROMPT) - 1 : -1]
        picked = torch.tensor(ids)[:, None]
        parts.append(logits.log_softmax(-1).gather(1, picked)[:, 0])
    return torch.cat(parts)


def of_trl(name: str, model: PreTrainedModel, folder: Path) -> Compared:
    """TRL's trainer scores the batch with ``model``, then takes the loss of moved weights."""
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    from tokenizers import Tokenizer, models

    words = {f"w{i}": i for i in range(128)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w1")),
        pad_token="w0",
        eos_token="w2",
        unk_token="w1",
    )
    sampled = [part.tolist() for part in sampled_logprobs(model)]
    fixed = {"prompt_ids": [PROMPT] * len(LENGTHS), "completion_ids": responses()}
    args = trl.GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=len(LENGTHS),
        num_generations=GROUP,
        num_iterations=2,  # old logprobs are kept
        max_completion_length=LIMIT,
        use_cpu=True,
        bf16=False,
        report_to="none",
        gradient_checkpointing=False,
        **CASES[name],
    )
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=lambda prompts, **_: REWARDS,
        args=args,
        train_dataset=datasets.Dataset.from_dict({"prompt": ["w7"] * len(LENGTHS)}),
        processing_class=tokenizer,
        rollout_func=lambda prompts, _: {**fixed, "logprobs": sampled},
    )
    if trainer.ref_model is not None:
        moved(trainer.ref_model.double(), 0.01, seed=2)
    trainer.use_vllm = "vllm_importance_sampling_mode" in CASES[name]
    trainer._last_loaded_step = trainer.state.global_step  # nothing to send to a vLLM
    trainer.current_gradient_accumulation_steps = 1
    model.train()
    scored = trainer._generate_and_score_completions([{"prompt": "w7"} for _ in LENGTHS])
    updated(model, name)
    loss = trainer._compute_loss(model, scored)
    loss.backward()
    return Compared(scored["advantages"], loss.detach(), gradient(model))


def of_method(name: str, model: PreTrainedModel) -> Compared:
    """The same by the method that the translation of TRL's arguments names."""
    given = {"num_generations": GROUP, "max_completion_length": LIMIT, **CASES[name]}
    given.setdefault("vllm_importance_sampling_correction", False)
    overrides = translate("trl", given, 1).overrides
    chosen = [f"{key}={value}" for key, value in overrides.items() if key.startswith("method.")]
    words = [text.removeprefix("method.") for text in chosen]
    method = load_method(overrides["method"], words, response_limit=LIMIT)
    reference = copy.deepcopy(model)
    moved(reference, 0.01, seed=2)
    rewards = torch.tensor(REWARDS, dtype=torch.float64)
    counts = torch.tensor(LENGTHS)
    groups = torch.arange(len(LENGTHS)) // GROUP
    credit = method.credit(ResponseBatch(rewards, rewards == 1, groups, counts))
    with torch.no_grad():
        old, ref = logprobs(model), logprobs(reference)
    sampler = torch.cat(sampled_logprobs(model))
    updated(model, name)
    batch = TokenBatch(
        logprobs=logprobs(model),
        old_logprobs=old,
        response_index=torch.repeat_interleave(torch.arange(len(LENGTHS)), counts),
        loss_mask=torch.ones(sum(LENGTHS), dtype=torch.bool),
        advantages=credit.advantages,
        kl_weights=credit.kl_weights,
        ref_logprobs=ref,
        sampler_logprobs=sampler,
        group_ids=groups,
    )
    loss = method.loss(batch).loss
    loss.backward()
    return Compared(credit.advantages, loss.detach(), gradient(model))


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_of_trl(name: str, tmp_path: Path) -> None:
    path = save_tiny_model(
        "qwen2", tmp_path / "model"
    )  # a folder, in which TRL finds its reference
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    theirs = of_trl(name, copy.deepcopy(model), tmp_path)
    ours = of_method(name, model)
    apart = (theirs.gradient - ours.gradient).norm() / theirs.gradient.norm()
    print(f"{name}: loss {theirs.loss:.9f} here {ours.loss:.9f}, gradient apart {apart:.1e}")
    assert theirs.gradient.norm() > 1e-3
    torch.testing.assert_close(ours.advantages.double(), theirs.advantages.double())
    assert apart < 1e-6  # TRL's rewards, advantages and output layer are in float32
    if name != ON_POLICY:
        torch.testing.assert_close(ours.loss, theirs.loss.double(), rtol=1e-6, atol=1e-7)
