"""The plain answer for every figure of the policy: transformers and autograd on whole sequences,
one process."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_rl.passes import LossOutput, Output, TokenView
from megatron_rl.types import SequenceBatch

TEMPERATURE = 0.7
ENTROPY = (Output("entropy", gradient=True),)  # what ``ClippedLoss`` reads
NUM_ROWS = 6
# Processes and ``parallel`` of each.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tensor": (2, {"tensor": 2, "sequence": True}),
    "context": (2, {"context": 2}),
    "pipeline": (2, {"pipeline": 2}),
    "data": (2, {}),
}


def make_batch(seed: int = 3, rows: int = NUM_ROWS, length: int | None = None) -> SequenceBatch:
    """Random sequences, neighbours with the same prompt in groups of three; ``length``: all of that
    many tokens (half prompt), else ragged."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.arange(rows) // 3
    prompts = torch.randint(1, 9, (rows,), generator=generator)[ids]
    responses = torch.randint(1, 17, (rows,), generator=generator)
    if length is not None:
        prompts, responses = (
            torch.full((rows,), length // 2),
            torch.full((rows,), length - length // 2),
        )
    tokens = torch.randint(3, 120, (int((prompts + responses).sum()),), generator=generator)
    batch = SequenceBatch(prompts, responses, ids, token_ids=tokens)
    for row in range(rows):
        first, here, size = batch.offsets[row // 3 * 3], batch.offsets[row], prompts[row]
        tokens[here : here + size] = tokens[first : first + size].clone()
    return batch


def sequences(batch: SequenceBatch) -> list[Tensor]:
    offsets = batch.offsets.tolist()
    return [batch.token_ids[a:b] for a, b in itertools.pairwise(offsets)]


def scores(model: torch.nn.Module, batch: SequenceBatch) -> tuple[Tensor, Tensor]:
    """(logprobs, entropy) of all response tokens at TEMPERATURE, or each at its own, with their
    graph."""
    logprobs, entropies = [], []
    divisors = batch.temperatures
    if divisors is None:
        divisors = torch.full((int(batch.response_lengths.sum()),), TEMPERATURE)
    of_rows = divisors[:, None].split(batch.response_lengths.tolist())
    for tokens, prompt, divisor in zip(
        sequences(batch), batch.prompt_lengths.tolist(), of_rows, strict=True
    ):
        logits = model(tokens[None]).logits[0, prompt - 1 : -1].float() / divisor
        logp = torch.log_softmax(logits, -1)
        logprobs.append(logp.gather(1, tokens[prompt:, None])[:, 0])
        entropies.append(-(logp.exp() * logp).sum(-1))
    return torch.cat(logprobs), torch.cat(entropies)


class ClippedLoss:
    """The loss of GRPO (clipped ratio, k3 divergence, mean over tokens of each sequence, mean over
    sequences) minus an entropy bonus, on fixed data; plus a tenth of the square of each sequence's
    mean log-ratio, which a context rank cannot compute alone.
    """

    def __init__(self, batch: SequenceBatch, logprobs: Tensor) -> None:
        generator = torch.Generator().manual_seed(11)
        noise = torch.randn(2, len(logprobs), generator=generator)
        self.old, self.ref = logprobs.detach() + 0.3 * noise[0], logprobs.detach() + 0.2 * noise[1]
        self.ids, self.rows = batch.response_index, batch.num_responses
        self.advantages = torch.randn(self.rows, generator=generator)
        self.per_row = batch.response_lengths.float()

    def contribution(
        self,
        index: Tensor,
        logprobs: Tensor,
        entropy: Tensor | None,
        over_ranks: Callable[[Tensor], Tensor],
    ) -> Tensor:
        ids = self.ids[index]
        weight = 1 / (self.per_row[ids] * self.rows)
        ratio = (logprobs - self.old[index]).exp()
        advantage = self.advantages[ids]
        gap = self.ref[index] - logprobs
        token = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage) + 0.1 * (
            gap.exp() - gap - 1
        )
        if entropy is not None:
            token = token - 0.01 * entropy
        log_ratio = over_ranks(
            torch.zeros(self.rows).index_add(
                0, ids, (logprobs - self.old[index]) / self.per_row[ids]
            )
        )
        return ((token + 0.1 * log_ratio[ids] ** 2) * weight).sum()

    def __call__(self, view: TokenView) -> LossOutput:
        loss = self.contribution(
            view.index, view.logprobs, view.columns.get("entropy"), view.sequence_sum
        )
        last = view.index.max().float() if len(view.index) else torch.tensor(-1.0)
        return LossOutput(loss, {"tokens": torch.tensor(float(len(view.index))), "index_max": last})


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    """Gradients by the names of the checkpoint files: transformers keeps the experts of a layer in
    one tensor."""
    # What moves experts without a gradient.
    biases = [each for each in model.named_buffers() if each[0].endswith("correction_bias")]
    found: dict[str, Tensor] = {name: torch.zeros_like(bias) for name, bias in biases}
    mixtral = model.config.model_type == "mixtral"
    names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    for key, parameter in model.named_parameters():
        prefix = key.replace(".mlp.", ".block_sparse_moe.") if mixtral else key
        fused = re.fullmatch(r"(.*\.experts)\.(gate_up_proj|down_proj)", prefix)
        if not fused or model.config.model_type == "gpt_oss":
            found[prefix] = parameter.grad
            continue
        for expert, gradient in enumerate(parameter.grad):
            if fused[2] == "down_proj":
                found[f"{fused[1]}.{expert}.{names[2]}.weight"] = gradient
            else:
                for name, half in zip(names[:2], gradient.chunk(2), strict=True):
                    found[f"{fused[1]}.{expert}.{name}.weight"] = half
    return found


def relative_error(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """||got - want|| / ||want|| over all tensors, which must be the same ones."""
    assert set(got) == set(want), f"different tensors: {sorted(set(got) ^ set(want))[:4]}"
    difference = sum(float((got[key].double() - want[key].double()).square().sum()) for key in want)
    return (
        difference / sum(float(value.double().square().sum()) for value in want.values())
    ) ** 0.5
