"""The exact probability of a right answer, against every answer there is."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from examples.claims.lab.exact import p_right, pass_at

END, VOCABULARY, LONGEST = 0, 4, 3
PROMPTS = [[1, 2], [3], [2, 2, 1]]
# Of different lengths, so that a batch is padded.
ANSWERS = [[[1, END], [2, 3, END]], [[END]], [[3, 1, END], [1, END], [2, END]]]


def small_model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        initializer_range=0.5,  # far from uniform
        attn_implementation="eager",
    )
    return Qwen3ForCausalLM(config).eval()


@torch.inference_mode()
def every_answer(model: Qwen3ForCausalLM, prompt: list[int]) -> dict[tuple[int, ...], float]:
    """The chance of each answer of up to ``LONGEST`` tokens, token by token without a batch."""
    found = {}
    for length in range(1, LONGEST + 1):
        for tokens in product(range(1, VOCABULARY), repeat=length - 1):
            chance = 1.0
            for place, token in enumerate([*tokens, END]):
                logits = model(torch.tensor([[*prompt, *tokens[:place]]])).logits[0, -1]
                chance *= float(logits.double().softmax(0)[token])
            found[*tokens, END] = chance
    return found


def test_it_is_the_sum_over_all_answers_that_are_right() -> None:
    model = small_model()
    found = p_right(model, PROMPTS, ANSWERS)
    for prompt, right, chance in zip(PROMPTS, ANSWERS, found.tolist(), strict=True):
        every = every_answer(model, prompt)
        assert len(every) == 1 + 3 + 9
        expected = sum(p for answer, p in every.items() if list(answer) in right)
        assert chance == pytest.approx(expected, abs=1e-6)
        assert 0.001 < chance < 0.999


def test_batches_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model()
    whole = p_right(model, PROMPTS, ANSWERS)
    monkeypatch.setattr("examples.claims.lab.exact._BATCH", 2)
    assert p_right(model, PROMPTS, ANSWERS) == pytest.approx(whole, abs=1e-7)


def test_pass_at_k_by_hand() -> None:
    """1 - 0.5^2 = 0.75 and 1 - 1^2 = 0, whose mean is 0.375."""
    assert pass_at(torch.tensor([0.5, 0.0], dtype=torch.float64), 2) == 0.375
