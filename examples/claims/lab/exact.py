"""Held-out pass@k of a run's exports, exactly: no answer is sampled.

The right answers to a prompt of the lab are few and short, so the probability of a right one is the
sum of theirs, each by one pass over its tokens and the end token; with the full stop and without.
Answers after dots are left out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, PreTrainedModel

from examples.claims.lab import tasks
from megatron_rl.config.load import validate
from megatron_rl.config.schema import DataConfig
from megatron_rl.data.prompts import load_prompts
from megatron_rl.data.tokenizer import load_tokenizer
from megatron_rl.reporting.metrics_file import PASS_AT, Row
from megatron_rl.run.start import EXPORTS, values_of_run

KS = (1, 2, 4, 8, 16, 32, 64, 256)
_BATCH = 256  # sequences of a pass


@torch.inference_mode()
def p_right(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[Sequence[int]]],
) -> Tensor:
    """[prompts], float64: the probability, at temperature 1, of any of the prompt's ``answers``,
    which are different and end with the end token."""
    found = torch.zeros(len(prompts), dtype=torch.float64)
    pairs = [(row, answer) for row, some in enumerate(answers) for answer in some]
    for start in range(0, len(pairs), _BATCH):
        chunk = pairs[start : start + _BATCH]
        sequences = [torch.tensor([*prompts[row], *answer]) for row, answer in chunk]
        tokens = pad_sequence(sequences, batch_first=True)
        # Token t is predicted at t - 1; padding is behind all that counts.
        logprobs = model(tokens).logits[:, :-1].double().log_softmax(-1)
        taken = logprobs.gather(2, tokens[:, 1:, None])[..., 0]
        place = torch.arange(1, tokens.shape[1])
        end = torch.tensor([len(sequence) for sequence in sequences])[:, None]
        first = end - torch.tensor([len(answer) for _, answer in chunk])[:, None]
        chosen = taken.where((first <= place) & (place < end), 0.0)
        found.index_add_(0, torch.tensor([row for row, _ in chunk]), chosen.sum(1).exp())
    return found.clamp(max=1)


def measured(run: Path) -> list[Row]:
    """Held-out metrics of the model that a run began with, as step 0, and of each of its exports,
    under the names of sampled ones; of each kind pass@1 as its accuracy, and pass@64. A second
    call reads what the first one left in the run's folder."""
    values = values_of_run(run)
    start = Path(values["model"]["path"])
    models = {0: start, **{int(path.name[-6:]): path for path in (run / EXPORTS).iterdir()}}
    kept = run / "exact.jsonl"
    if kept.is_file():
        rows: list[Row] = [json.loads(line) for line in kept.read_text("utf-8").splitlines()]
        if [row["step"] for row in rows] == sorted(models):
            return rows
    tokenizer = load_tokenizer(start)
    data = validate(DataConfig, values["data"], "data")
    limit = values["rollout"]["max_prompt_tokens"]
    prompts = load_prompts(data.eval, data, tokenizer, limit)[: values["evaluation"]["num_prompts"]]
    end = tokenizer.eos_token or ""
    answers = [
        [
            tokenizer.encode(f"{text}{stop}{end}", add_special_tokens=False)
            for text in prompt.extra["right"]
            for stop in ("", tasks.STOP)
        ]
        for prompt in prompts
    ]
    kinds = {prompt.data_source for prompt in prompts}
    rows = []
    for step, path in sorted(models.items()):
        model = AutoModelForCausalLM.from_pretrained(path)
        right = p_right(model, [prompt.token_ids for prompt in prompts], answers)
        row: Row = {"step": step, **{f"{PASS_AT}{k}": pass_at(right, k) for k in KS}}
        for kind in sorted(kinds):
            of_kind = right[torch.tensor([prompt.data_source == kind for prompt in prompts])]
            row |= {f"eval/accuracy/{kind}": pass_at(of_kind, 1)}
            row |= {f"{PASS_AT}64/{kind}": pass_at(of_kind, 64)}
        rows.append(row)
    kept.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return rows


def pass_at(right: Tensor, k: int) -> float:
    """The mean chance that one of ``k`` answers is right."""
    return float((1 - (1 - right) ** k).mean())
