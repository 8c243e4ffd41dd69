"""The declared tables against figures worked out by hand, and against Megatron's own rank and layer
order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_rl.models.base import ATTENTION, DENSE_MLP, QKV_BIAS, Architecture
from megatron_rl.models.moe import mixtral
from megatron_rl.types import Shard
from megatron_rl.weight_sync.planner.shards import ShardGroup, subview
from megatron_rl.weight_sync.planner.slices import Slice
from tests.unit.weight_sync.training_tables import TrainLayout, shape_from_hf, train_shards
from tools.planning.engine_tables import ModelShape, RolloutLayout, rollout_shards
from tools.planning.shard_table import expand
from tools.planning.training_shards import parse_training, training_shards

# Two query groups of two heads of dimension 3: the fused matrix has rows q0 q1 k0 v0 | q2 q3 k1 v1,
# 12 rows a group.
MODEL = ModelShape(layers=2, hidden=5, heads=4, kv_heads=2, head_dim=3, ffn=8, vocab=130)


def find(
    groups: list[ShardGroup], tensor: str
) -> list[tuple[tuple[int, ...], tuple[int, ...], str, int, tuple[int, ...]]]:
    """(start, shape, parameter, offset, stride) of each shard of one tensor."""
    return [
        (shard.start, shard.shape, shard.key, shard.offset, shard.stride)
        for shard in expand(groups)
        if shard.name == tensor
    ]


def test_fused_query_key_value_is_interleaved_by_group() -> None:
    groups = train_shards(MODEL, TrainLayout(), 0)
    key = "0:decoder.layers.1.self_attention.linear_qkv.weight"
    assert find(groups, "model.layers.1.self_attn.q_proj.weight") == [
        ((0, 0), (6, 5), key, 0, (5, 1)),
        ((6, 0), (6, 5), key, 60, (5, 1)),
    ]
    assert find(groups, "model.layers.1.self_attn.k_proj.weight") == [
        ((0, 0), (3, 5), key, 30, (5, 1)),
        ((3, 0), (3, 5), key, 90, (5, 1)),
    ]
    assert find(groups, "model.layers.1.self_attn.v_proj.weight") == [
        ((0, 0), (3, 5), key, 45, (5, 1)),
        ((3, 0), (3, 5), key, 105, (5, 1)),
    ]


def test_more_ranks_than_query_groups_cut_the_fused_matrix_evenly() -> None:
    """Four ranks, six rows each: rank 0 has q0 q1, rank 1 has k0 v0."""
    key = "0:decoder.layers.0.self_attention.linear_qkv.weight"
    first, second = (train_shards(MODEL, TrainLayout(tp=4), rank) for rank in (0, 1))
    assert find(first, "model.layers.0.self_attn.q_proj.weight") == [
        ((0, 0), (6, 5), key, 0, (5, 1))
    ]
    assert find(first, "model.layers.0.self_attn.k_proj.weight") == []
    assert find(second, "model.layers.0.self_attn.k_proj.weight") == [
        ((0, 0), (3, 5), key, 0, (5, 1))
    ]
    assert find(second, "model.layers.0.self_attn.v_proj.weight") == [
        ((0, 0), (3, 5), key, 15, (5, 1))
    ]


def test_gate_and_up_are_stacked_within_the_rank_and_down_is_cut_by_columns() -> None:
    groups = train_shards(MODEL, TrainLayout(tp=2), 1)
    fc1, fc2 = (f"0:decoder.layers.0.mlp.linear_fc{i}.weight" for i in (1, 2))
    assert find(groups, "model.layers.0.mlp.gate_proj.weight") == [((4, 0), (4, 5), fc1, 0, (5, 1))]
    assert find(groups, "model.layers.0.mlp.up_proj.weight") == [((4, 0), (4, 5), fc1, 20, (5, 1))]
    assert find(groups, "model.layers.0.mlp.down_proj.weight") == [((0, 4), (5, 4), fc2, 0, (4, 1))]


def test_vocabulary_padding_belongs_to_no_shard() -> None:
    """130 rows are padded to 256 for training (128 a rank at tp=2), to 192 for the rollout (96 a
    rank)."""
    train = [
        find(train_shards(MODEL, TrainLayout(tp=2), rank), "lm_head.weight")[0][:2]
        for rank in (0, 1)
    ]
    rollout = [
        find(rollout_shards(MODEL, RolloutLayout(tp=2), rank), "lm_head.weight")[0][:2]
        for rank in (0, 1)
    ]
    assert train == [((0, 0), (128, 5)), ((128, 0), (2, 5))]
    assert rollout == [((0, 0), (96, 5)), ((96, 0), (34, 5))]
    assert (
        find(train_shards(replace(MODEL, vocab=128), TrainLayout(tp=2), 1), "lm_head.weight") == []
    )


def test_tied_head_is_the_embedding_and_has_a_copy_on_the_last_stage() -> None:
    tied = replace(MODEL, tied=True)
    keys = [
        [
            box[2]
            for box in find(
                train_shards(tied, TrainLayout(pp=2), rank), "model.embed_tokens.weight"
            )
        ]
        for rank in (0, 1)
    ]
    assert keys == [["0:embedding.word_embeddings.weight"], ["0:output_layer.weight"]]
    assert find(train_shards(tied, TrainLayout(), 0), "lm_head.weight") == []
    assert find(rollout_shards(tied, RolloutLayout(), 0), "lm_head.weight") == []


def test_key_value_heads_are_replicated_where_the_rollout_has_more_ranks() -> None:
    """tp=4, two key heads: ranks 0 and 1 want head 0, ranks 2 and 3 head 1, after the three rows of
    their one query head."""
    got = [
        find(
            rollout_shards(MODEL, RolloutLayout(tp=4, dp=2), rank),
            "model.layers.0.self_attn.k_proj.weight",
        )[0]
        for rank in range(8)
    ]
    assert [box[0][0] for box in got] == [0, 0, 3, 3, 0, 0, 3, 3]
    assert {box[2:4] for box in got} == {("model.layers.0.self_attn.qkv_proj.weight", 15)}


def test_experts_of_the_rollout() -> None:
    """Five experts on two expert-parallel ranks: 0-2 and 3-4, whole. Without: every expert, half of
    its width."""
    model = replace(MODEL, experts=5, moe_ffn=4)
    layer, w13 = (
        "model.layers.0.mlp.experts.",
        "model.layers.0.mlp.experts.routed_experts.w13_weight",
    )
    whole = rollout_shards(model, RolloutLayout(tp=2, ep=2), 1)
    assert find(whole, layer + "2.gate_proj.weight") == []
    assert find(whole, layer + "4.up_proj.weight") == [
        ((0, 0), (4, 5), w13, (2 + 1) * 4 * 5, (5, 1))
    ]
    assert find(whole, layer + "4.down_proj.weight") == [
        ((0, 0), (5, 4), layer + "routed_experts.w2_weight", 20, (4, 1))
    ]
    half = rollout_shards(model, RolloutLayout(tp=2), 1)
    assert find(half, layer + "4.up_proj.weight") == [
        ((2, 0), (2, 5), w13, (2 * 4 + 1) * 2 * 5, (5, 1))
    ]


def test_experts_of_a_training_rank() -> None:
    """tp=2, ep=2, etp=1: rank 1 is tensor-parallel rank 1 and holds experts 2 and 3 whole."""
    model = replace(MODEL, experts=4, moe_ffn=4, expert_names="mixtral")
    groups = train_shards(model, TrainLayout(tp=2, ep=2), 1)
    key = "0:decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight"
    assert find(groups, "model.layers.0.block_sparse_moe.experts.3.w3.weight") == [
        ((0, 0), (4, 5), key, 20, (5, 1))
    ]
    assert find(groups, "model.layers.0.block_sparse_moe.experts.1.w3.weight") == []


def test_rank_order_is_megatrons() -> None:
    """tp=2, cp=2, dp=2, pp=2; experts ep=4, etp=1: written out by hand from the order
    tp-cp-ep-dp-pp, fastest first."""
    layout = TrainLayout(tp=2, cp=2, dp=2, pp=2, ep=4)
    got = [
        tuple(layout.coordinates(rank)[axis] for axis in ("tp", "cp", "dp", "pp", "ep", "edp"))
        for rank in range(layout.ranks)
    ]
    assert got[:8] == [
        (0, 0, 0, 0, 0, 0),
        (1, 0, 0, 0, 1, 0),
        (0, 1, 0, 0, 2, 0),
        (1, 1, 0, 0, 3, 0),
        (0, 0, 1, 0, 0, 1),
        (1, 0, 1, 0, 1, 1),
        (0, 1, 1, 0, 2, 1),
        (1, 1, 1, 0, 3, 1),
    ]
    assert got[8:] == [(*a[:3], 1, *a[4:]) for a in got[:8]]


@pytest.mark.parametrize(
    ("layout", "layers", "expected"),
    [
        (TrainLayout(pp=2), 4, [[[0, 1]], [[2, 3]]]),
        (TrainLayout(pp=2, vpp=2), 8, [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]),
        (TrainLayout(pp=3, first_layers=1, last_layers=2), 7, [[[0]], [[1, 2, 3, 4]], [[5, 6]]]),
        (
            TrainLayout(pp=3, vpp=2, first_layers=2, last_layers=2),
            8,
            [[[0], [4]], [[1, 2], [5, 6]], [[3], [7]]],
        ),
    ],
)
def test_layers_of_the_chunks(layout: TrainLayout, layers: int, expected: list) -> None:
    assert [[list(chunk) for chunk in stage] for stage in layout.chunks(layers)] == expected


@pytest.mark.full
def test_order_of_ranks_and_layers_is_that_of_the_installed_megatron() -> None:
    """Megatron's own generators, without process groups: groups of every axis, and first layer and
    number of layers of each chunk."""
    from megatron.core.parallel_state import RankGenerator
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    layout = TrainLayout(tp=2, cp=2, dp=3, pp=2, ep=3, etp=2)
    order, edp = "tp-cp-ep-dp-pp", layout.tp * layout.cp * layout.dp // (layout.ep * layout.etp)
    dense = RankGenerator(tp=2, ep=1, dp=3, pp=2, cp=2, order=order)
    expert = RankGenerator(tp=2, ep=3, dp=edp, pp=2, cp=1, order=order)
    axes = ((dense, "tp", "tp"), (dense, "cp", "cp"), (dense, "dp", "dp"), (dense, "pp", "pp"))
    for generator, token, axis in (
        *axes,
        (expert, "tp", "etp"),
        (expert, "ep", "ep"),
        (expert, "dp", "edp"),
    ):
        for group in generator.get_ranks(token):
            assert [layout.coordinates(rank)[axis] for rank in group] == list(range(len(group)))
    cases = [
        (TrainLayout(pp=4), 8),
        (TrainLayout(pp=2, vpp=2), 8),
        (TrainLayout(pp=4, first_layers=1, last_layers=3), 8),
    ]
    cases += [
        (TrainLayout(pp=4, vpp=2, first_layers=2, last_layers=2), 12),
        (TrainLayout(pp=3, last_layers=2), 8),
    ]
    for layout, layers in cases:
        config = TransformerConfig(
            num_layers=layers,
            hidden_size=8,
            num_attention_heads=2,
            pipeline_model_parallel_size=layout.pp,
            pipeline_dtype="float32",
            virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
            num_layers_in_first_pipeline_stage=layout.first_layers,
            num_layers_in_last_pipeline_stage=layout.last_layers,
        )
        for stage, chunks in enumerate(layout.chunks(layers)):
            for chunk, ours in enumerate(chunks):
                assert ours.start == get_transformer_layer_offset(
                    config, vp_stage=chunk, pp_rank=stage
                )
                assert len(ours) == get_num_layers_to_build(config, vp_stage=chunk, pp_rank=stage)


@pytest.mark.parametrize(
    ("train", "rollout", "message"),
    [
        (TrainLayout(tp=3), None, "heads=4 does not divide by train tp=3"),
        (
            TrainLayout(tp=2, ep=4),
            None,
            r"ranks of a pipeline stage=2 does not divide by etp\*ep=4",
        ),
        (TrainLayout(pp=3), None, "2 layers do not divide over pp=3"),
        (TrainLayout(pp=2, vpp=2), None, "do not divide into vpp=2 chunks"),
        (
            None,
            RolloutLayout(tp=3),
            "padded vocabulary=192|heads=4 does not divide by rollout tp=3",
        ),
        (None, RolloutLayout(tp=2, dp=2, ep=3), "ep=3 must be a multiple of tp=2"),
    ],
)
def test_sizes_that_do_not_divide_are_named(
    train: TrainLayout | None, rollout: RolloutLayout | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        if train:
            train_shards(MODEL, train, 0)
        if rollout:
            rollout_shards(MODEL, rollout, 0)


def test_model_shape_from_hf_config() -> None:
    config = {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 4,
        "hidden_size": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 32,
        "vocab_size": 100,
        "tie_word_embeddings": False,
        "num_experts": 6,
        "moe_intermediate_size": 12,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [1],
        "attention_bias": False,
    }
    assert shape_from_hf(config) == ModelShape(
        layers=4,
        hidden=8,
        heads=4,
        kv_heads=2,
        head_dim=16,
        ffn=32,
        vocab=100,
        qk_norm=True,
        experts=6,
        moe_ffn=12,
        dense_layers=(0, 1, 2),
    )
    with pytest.raises(ValueError, match="model_type='mamba' has no declared layout"):
        shape_from_hf({"model_type": "mamba"})
    with pytest.raises(ValueError, match="attention_bias=true is not described"):
        shape_from_hf({**config, "attention_bias": True})


def test_view_of_a_part_of_a_shard() -> None:
    """Rows 3-4, columns 1-2 of a shard that starts at (2, 0) and lies at offset 7 with row stride
    10: 7 + 10 + 1 = 18."""
    group = ShardGroup(("w",), ("p",), Shard("", (9, 9), (2, 0), (4, 9), 7, (10, 1)))
    assert subview(group, 0, Slice((3, 1), (2, 2))) == ("p", 18, (2, 2), (10, 1))


DENSE_ARCH = Architecture(
    family="llama",
    num_layers=8,
    hidden_size=12,
    num_heads=8,
    num_kv_heads=2,
    head_dim=4,
    ffn_hidden_size=24,
    vocab_size=90,
    norm_eps=1e-6,
    rope_theta=1e4,
    rope_type="default",
    tied_embeddings=False,
    max_positions=64,
    layer_slots=ATTENTION + DENSE_MLP,
)
TIED_ARCH = replace(
    DENSE_ARCH,
    family="qwen2",
    tied_embeddings=True,
    qkv_bias=True,
    layer_slots=ATTENTION + QKV_BIAS + DENSE_MLP,
)
SPARSE_ARCH = replace(
    DENSE_ARCH,
    family="mixtral",
    layer_slots=ATTENTION + mixtral.ROUTER,
    num_experts=8,
    experts_per_token=2,
    expert_ffn_hidden_size=8,
    expert_slots=mixtral.EXPERT,
    expert_prefix="block_sparse_moe.experts",
)


@pytest.mark.parametrize(
    ("arch", "layout"),
    [
        (DENSE_ARCH, "tp=1"),
        (DENSE_ARCH, "tp=4,pp=2,cp=2,dp=2,vpp=2"),
        (DENSE_ARCH, "pp=4,first_layers=1,last_layers=3,vocab_multiple=8"),
        (TIED_ARCH, "tp=2,pp=2,dp=2"),
        (TIED_ARCH, "tp=8"),
        (SPARSE_ARCH, "tp=2,ep=4,dp=2"),
        (SPARSE_ARCH, "tp=2,etp=2,ep=2,dp=4,pp=2"),
        (SPARSE_ARCH, "tp=2,pp=2,vpp=2,ep=2"),
    ],
)
def test_the_parameter_map_says_what_the_tables_say(arch: Architecture, layout: str) -> None:
    """Two ways to the shards of every rank that know nothing of each other."""
    training = parse_training("--train", layout)
    declared = TrainLayout(
        **{name: int(size) for name, size in (item.split("=") for item in layout.split(","))}
    )
    assert training.world_size == declared.ranks
    for rank in range(declared.ranks):
        by_map = expand(training_shards(arch, training, rank))
        by_table = expand(train_shards(ModelShape.of(arch), declared, rank))
        key = lambda shard: (shard.key, shard.offset)  # noqa: E731
        assert sorted(by_map, key=key) == sorted(by_table, key=key), f"rank {rank}"


def test_a_family_without_a_table_is_named() -> None:
    with pytest.raises(ValueError, match="family 'mamba' has no declared layout; known: deep"):
        ModelShape.of(replace(DENSE_ARCH, family="mamba"))


@pytest.mark.parametrize(
    ("arch", "layout", "message"),
    [
        (DENSE_ARCH, "tp=3", "parallel.tensor = 3: does not divide the model's 8 attention heads"),
        (DENSE_ARCH, "pp=3", "parallel.pipeline = 3: 8 of 8 layers do not divide into 3 stages"),
        (DENSE_ARCH, "dp=2,ep=2", "parallel.expert = 2: the model has no experts"),
        (DENSE_ARCH, "pp=4,vpp=4", "parallel.virtual_pipeline = 4: "),
        (SPARSE_ARCH, "ep=3,dp=3", "parallel.expert = 3: does not divide the model's 8 experts"),
        (SPARSE_ARCH, "tp=2,ep=4", "expert_tensor 1 x expert 4 x pipeline 1 = 4 does not divide"),
    ],
)
def test_a_training_layout_that_does_not_fit_is_named(
    arch: Architecture, layout: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        training_shards(arch, parse_training("--train", layout), 0)
