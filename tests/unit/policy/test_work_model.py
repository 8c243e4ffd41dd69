"""The work of a sequence, and the crossover of a model, by hand."""

from __future__ import annotations

import numpy as np

from megatron_rl.policy.batches.work_model import WorkModel
from tests.unit.planning_of_7b import QWEN2_5_7B
from tests.unit.small_models import EXPERTS


def test_work_by_hand():
    model = WorkModel(100)
    assert model.work(np.array([10, 100, 200])).tolist() == [10 + 1, 100 + 100, 200 + 400]
    # Behind 100 tokens, 100 more attend to 200^2 - 100^2 = 30,000 pairs.
    assert model.work(np.array([100]), context=100).tolist() == [100 + 300]


def test_the_crossover_of_a_dense_model():
    # A layer: query, key and value of 28 + 2 x 4 heads, output, three matrices of the
    # feed-forward; then the head.
    layer = 4608 * 3584 + 3584 * 3584 + 3 * 3584 * 18944
    crossover = (28 * layer + 152064 * 3584) // (28 * 3584)
    assert WorkModel.of(QWEN2_5_7B) == WorkModel(crossover) == WorkModel(70_454)


def test_the_experts_that_a_token_does_not_pass_are_no_work():
    arch = EXPERTS
    width = arch.num_heads * arch.head_dim
    attention = (width + 2 * arch.num_kv_heads * arch.head_dim) * arch.hidden_size
    attention += width * arch.hidden_size
    router = arch.num_experts * arch.hidden_size
    expert = 3 * arch.hidden_size * arch.expert_ffn_hidden_size
    layer = attention + router + arch.experts_per_token * expert
    parameters = arch.num_layers * layer + arch.vocab_size * arch.hidden_size
    assert arch.num_experts > arch.experts_per_token > 0
    assert WorkModel.of(arch) == WorkModel(parameters // (arch.num_layers * width))
