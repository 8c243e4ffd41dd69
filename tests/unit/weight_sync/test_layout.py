"""The declared tables against figures worked out by hand, and against Megatron's own rank and layer order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_rl.weight_sync.boxes import Boxes, subview
from megatron_rl.weight_sync.layout import ModelShape, RolloutLayout, TrainLayout, rollout_boxes, train_boxes

# Two query groups of two heads of dimension 3: the fused matrix has rows q0 q1 k0 v0 | q2 q3 k1 v1, 12 rows a group.
MODEL = ModelShape(layers=2, hidden=5, heads=4, kv_heads=2, head_dim=3, ffn=8, vocab=130)


def find(boxes: list[Boxes], tensor: str) -> list[tuple[tuple[int, ...], tuple[int, ...], str, int, tuple[int, ...]]]:
    """(start, shape, parameter, offset, stride) of each box of one tensor."""
    return [
        (box.start, box.shape, box.keys[i], box.offset, box.stride) for box in boxes for i, name in enumerate(box.tensors) if name == tensor
    ]


def test_fused_query_key_value_is_interleaved_by_group() -> None:
    boxes = train_boxes(MODEL, TrainLayout(), 0)
    key = "0:decoder.layers.1.self_attention.linear_qkv.weight"
    assert find(boxes, "model.layers.1.self_attn.q_proj.weight") == [((0, 0), (6, 5), key, 0, (5, 1)), ((6, 0), (6, 5), key, 60, (5, 1))]
    assert find(boxes, "model.layers.1.self_attn.k_proj.weight") == [((0, 0), (3, 5), key, 30, (5, 1)), ((3, 0), (3, 5), key, 90, (5, 1))]
    assert find(boxes, "model.layers.1.self_attn.v_proj.weight") == [((0, 0), (3, 5), key, 45, (5, 1)), ((3, 0), (3, 5), key, 105, (5, 1))]


def test_more_ranks_than_query_groups_cut_the_fused_matrix_evenly() -> None:
    """Four ranks, six rows each: rank 0 has q0 q1, rank 1 has k0 v0."""
    key = "0:decoder.layers.0.self_attention.linear_qkv.weight"
    first, second = (train_boxes(MODEL, TrainLayout(tp=4), rank) for rank in (0, 1))
    assert find(first, "model.layers.0.self_attn.q_proj.weight") == [((0, 0), (6, 5), key, 0, (5, 1))]
    assert find(first, "model.layers.0.self_attn.k_proj.weight") == []
    assert find(second, "model.layers.0.self_attn.k_proj.weight") == [((0, 0), (3, 5), key, 0, (5, 1))]
    assert find(second, "model.layers.0.self_attn.v_proj.weight") == [((0, 0), (3, 5), key, 15, (5, 1))]


def test_gate_and_up_are_stacked_within_the_rank_and_down_is_cut_by_columns() -> None:
    boxes = train_boxes(MODEL, TrainLayout(tp=2), 1)
    fc1, fc2 = (f"0:decoder.layers.0.mlp.linear_fc{i}.weight" for i in (1, 2))
    assert find(boxes, "model.layers.0.mlp.gate_proj.weight") == [((4, 0), (4, 5), fc1, 0, (5, 1))]
    assert find(boxes, "model.layers.0.mlp.up_proj.weight") == [((4, 0), (4, 5), fc1, 20, (5, 1))]
    assert find(boxes, "model.layers.0.mlp.down_proj.weight") == [((0, 4), (5, 4), fc2, 0, (4, 1))]


def test_vocabulary_padding_belongs_to_no_box() -> None:
    """130 rows are padded to 256 for training (128 a rank at tp=2), to 192 for the rollout (96 a rank)."""
    train = [find(train_boxes(MODEL, TrainLayout(tp=2), rank), "lm_head.weight")[0][:2] for rank in (0, 1)]
    rollout = [find(rollout_boxes(MODEL, RolloutLayout(tp=2), rank), "lm_head.weight")[0][:2] for rank in (0, 1)]
    assert train == [((0, 0), (128, 5)), ((128, 0), (2, 5))]
    assert rollout == [((0, 0), (96, 5)), ((96, 0), (34, 5))]
    assert find(train_boxes(replace(MODEL, vocab=128), TrainLayout(tp=2), 1), "lm_head.weight") == []


def test_tied_head_is_the_embedding_and_has_a_copy_on_the_last_stage() -> None:
    tied = replace(MODEL, tied=True)
    keys = [[box[2] for box in find(train_boxes(tied, TrainLayout(pp=2), rank), "model.embed_tokens.weight")] for rank in (0, 1)]
    assert keys == [["0:embedding.word_embeddings.weight"], ["0:output_layer.weight"]]
    assert find(train_boxes(tied, TrainLayout(), 0), "lm_head.weight") == []
    assert find(rollout_boxes(tied, RolloutLayout(), 0), "lm_head.weight") == []


def test_key_value_heads_are_replicated_where_the_rollout_has_more_ranks() -> None:
    """tp=4, two key heads: ranks 0 and 1 want head 0, ranks 2 and 3 head 1, after the three rows of their one query head."""
    got = [find(rollout_boxes(MODEL, RolloutLayout(tp=4, dp=2), rank), "model.layers.0.self_attn.k_proj.weight")[0] for rank in range(8)]
    assert [box[0][0] for box in got] == [0, 0, 3, 3, 0, 0, 3, 3]
    assert {box[2:4] for box in got} == {("model.layers.0.self_attn.qkv_proj.weight", 15)}


def test_experts_of_the_rollout() -> None:
    """Five experts on two expert-parallel ranks: 0-2 and 3-4, whole. Without: every expert, half of its width."""
    model = replace(MODEL, experts=5, moe_ffn=4)
    layer, w13 = "model.layers.0.mlp.experts.", "model.layers.0.mlp.experts.routed_experts.w13_weight"
    whole = rollout_boxes(model, RolloutLayout(tp=2, ep=2), 1)
    assert find(whole, layer + "2.gate_proj.weight") == []
    assert find(whole, layer + "4.up_proj.weight") == [((0, 0), (4, 5), w13, (2 + 1) * 4 * 5, (5, 1))]
    assert find(whole, layer + "4.down_proj.weight") == [((0, 0), (5, 4), layer + "routed_experts.w2_weight", 20, (4, 1))]
    half = rollout_boxes(model, RolloutLayout(tp=2), 1)
    assert find(half, layer + "4.up_proj.weight") == [((2, 0), (2, 5), w13, (2 * 4 + 1) * 2 * 5, (5, 1))]


def test_experts_of_a_training_rank() -> None:
    """tp=2, ep=2, etp=1: rank 1 is tensor-parallel rank 1 and holds experts 2 and 3 whole."""
    model = replace(MODEL, experts=4, moe_ffn=4, expert_names="mixtral")
    boxes = train_boxes(model, TrainLayout(tp=2, ep=2), 1)
    key = "0:decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight"
    assert find(boxes, "model.layers.0.block_sparse_moe.experts.3.w3.weight") == [((0, 0), (4, 5), key, 20, (5, 1))]
    assert find(boxes, "model.layers.0.block_sparse_moe.experts.1.w3.weight") == []


def test_rank_order_is_megatrons() -> None:
    """tp=2, cp=2, dp=2, pp=2; experts ep=4, etp=1: written out by hand from the order tp-cp-ep-dp-pp, fastest first."""
    layout = TrainLayout(tp=2, cp=2, dp=2, pp=2, ep=4)
    got = [tuple(layout.coordinates(rank)[axis] for axis in ("tp", "cp", "dp", "pp", "ep", "edp")) for rank in range(layout.ranks)]
    assert got[:8] == [
        (0, 0, 0, 0, 0, 0), (1, 0, 0, 0, 1, 0), (0, 1, 0, 0, 2, 0), (1, 1, 0, 0, 3, 0),
        (0, 0, 1, 0, 0, 1), (1, 0, 1, 0, 1, 1), (0, 1, 1, 0, 2, 1), (1, 1, 1, 0, 3, 1),
    ]  # fmt: skip
    assert got[8:] == [(*a[:3], 1, *a[4:]) for a in got[:8]]


@pytest.mark.parametrize(
    ("layout", "layers", "expected"),
    [
        (TrainLayout(pp=2), 4, [[[0, 1]], [[2, 3]]]),
        (TrainLayout(pp=2, vpp=2), 8, [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]),
        (TrainLayout(pp=3, first_layers=1, last_layers=2), 7, [[[0]], [[1, 2, 3, 4]], [[5, 6]]]),
        (TrainLayout(pp=3, vpp=2, first_layers=2, last_layers=2), 8, [[[0], [4]], [[1, 2], [5, 6]], [[3], [7]]]),
    ],
)
def test_layers_of_the_chunks(layout: TrainLayout, layers: int, expected: list) -> None:
    assert [[list(chunk) for chunk in stage] for stage in layout.chunks(layers)] == expected


@pytest.mark.full
def test_order_of_ranks_and_layers_is_that_of_the_installed_megatron() -> None:
    """Megatron's own generators, without process groups: groups of every axis, and first layer and number of layers of each chunk."""
    from megatron.core.parallel_state import RankGenerator
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    layout = TrainLayout(tp=2, cp=2, dp=3, pp=2, ep=3, etp=2)
    order, edp = "tp-cp-ep-dp-pp", layout.tp * layout.cp * layout.dp // (layout.ep * layout.etp)
    dense = RankGenerator(tp=2, ep=1, dp=3, pp=2, cp=2, order=order)
    expert = RankGenerator(tp=2, ep=3, dp=edp, pp=2, cp=1, order=order)
    axes = ((dense, "tp", "tp"), (dense, "cp", "cp"), (dense, "dp", "dp"), (dense, "pp", "pp"))
    for generator, token, axis in (*axes, (expert, "tp", "etp"), (expert, "ep", "ep"), (expert, "dp", "edp")):
        for group in generator.get_ranks(token):
            assert [layout.coordinates(rank)[axis] for rank in group] == list(range(len(group)))
    cases = [(TrainLayout(pp=4), 8), (TrainLayout(pp=2, vpp=2), 8), (TrainLayout(pp=4, first_layers=1, last_layers=3), 8)]
    cases += [(TrainLayout(pp=4, vpp=2, first_layers=2, last_layers=2), 12), (TrainLayout(pp=3, last_layers=2), 8)]
    for layout, layers in cases:
        config = TransformerConfig(
            num_layers=layers, hidden_size=8, num_attention_heads=2, pipeline_model_parallel_size=layout.pp, pipeline_dtype="float32",
            virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
            num_layers_in_first_pipeline_stage=layout.first_layers, num_layers_in_last_pipeline_stage=layout.last_layers,
        )  # fmt: skip
        for stage, chunks in enumerate(layout.chunks(layers)):
            for chunk, ours in enumerate(chunks):
                assert ours.start == get_transformer_layer_offset(config, vp_stage=chunk, pp_rank=stage)
                assert len(ours) == get_num_layers_to_build(config, vp_stage=chunk, pp_rank=stage)


@pytest.mark.parametrize(
    ("train", "rollout", "message"),
    [
        (TrainLayout(tp=3), None, "heads=4 does not divide by train tp=3"),
        (TrainLayout(tp=2, ep=4), None, r"ranks of a pipeline stage=2 does not divide by etp\*ep=4"),
        (TrainLayout(pp=3), None, "2 layers do not divide over pp=3"),
        (TrainLayout(pp=2, vpp=2), None, "do not divide into vpp=2 chunks"),
        (None, RolloutLayout(tp=3), "padded vocabulary=192|heads=4 does not divide by rollout tp=3"),
        (None, RolloutLayout(tp=2, dp=2, ep=3), "ep=3 must be a multiple of tp=2"),
    ],
)
def test_sizes_that_do_not_divide_are_named(train: TrainLayout | None, rollout: RolloutLayout | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        if train:
            train_boxes(MODEL, train, 0)
        if rollout:
            rollout_boxes(MODEL, rollout, 0)


def test_model_shape_from_hf_config() -> None:
    config = {
        "model_type": "qwen3_moe", "num_hidden_layers": 4, "hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "intermediate_size": 32, "vocab_size": 100, "tie_word_embeddings": False, "num_experts": 6,
        "moe_intermediate_size": 12, "decoder_sparse_step": 2, "mlp_only_layers": [1], "attention_bias": False,
    }  # fmt: skip
    assert ModelShape.from_hf(config) == ModelShape(
        layers=4, hidden=8, heads=4, kv_heads=2, head_dim=16, ffn=32, vocab=100, qk_norm=True, experts=6, moe_ffn=12, dense_layers=(0, 1, 2)
    )
    with pytest.raises(ValueError, match="model_type='mamba' has no declared layout"):
        ModelShape.from_hf({"model_type": "mamba"})
    with pytest.raises(ValueError, match="attention_bias=true is not described"):
        ModelShape.from_hf({**config, "attention_bias": True})


def test_view_of_a_part_of_a_box() -> None:
    """Rows 3-4, columns 1-2 of a box that starts at (2, 0) and lies at offset 7 with row stride 10: 7 + 10 + 1 = 18."""
    box = Boxes(("w",), (9, 9), "float32", (2, 0), (4, 9), ("p",), 7, (10, 1))
    assert subview(box, 0, ((3, 1), (2, 2))) == ("p", 18, (2, 2), (10, 1))
