"""What each pipeline stage of an engine holds, in the declared tables."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_rl.weight_sync.planner.shards import ShardGroup
from tools.planning.engine_tables import ModelShape, RolloutLayout, rollout_shards

MODEL = ModelShape(layers=2, hidden=5, heads=4, kv_heads=2, head_dim=3, ffn=8, vocab=130)


def expanded_names(groups: list[ShardGroup]) -> set[str]:
    return {name for group in groups for name in group.names}


@pytest.mark.parametrize(
    ("layers", "stages", "want"), [(10, 4, [2, 3, 3, 2]), (5, 2, [3, 2]), (7, 4, [2, 2, 2, 1])]
)
def test_stages_of_an_engine_have_the_layers_that_vllm_gives_them(layers, stages, want) -> None:
    model = replace(MODEL, layers=layers)
    found = []
    for stage in range(stages):
        names = expanded_names(rollout_shards(model, RolloutLayout(tp=2, pp=stages), 2 * stage + 1))
        found.append(len({name for name in names if "layers." in name and "o_proj" in name}))
        assert ("model.embed_tokens.weight" in names) == (stage == 0)
        assert ("lm_head.weight" in names) == ("model.norm.weight" in names)
        assert ("lm_head.weight" in names) == (stage == stages - 1)
    assert found == want


def test_ends_of_a_model_on_the_stages_of_an_engine() -> None:
    """The tied head is the embedding on the last stage; with experts every stage has all ends."""
    layout = RolloutLayout(pp=2)
    tied = [rollout_shards(replace(MODEL, tied=True), layout, rank) for rank in (0, 1)]
    assert all("model.embed_tokens.weight" in expanded_names(groups) for groups in tied)
    model = replace(MODEL, experts=4, moe_ffn=4)
    for rank in (0, 1):
        names = expanded_names(rollout_shards(model, layout, rank))
        assert {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"} <= names
