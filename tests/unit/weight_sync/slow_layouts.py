"""Shards cut by chunk, cat and stack from whole HF tensors, and a simulation of a plan in one
process.

Written without the tables under test: ranks come from nested loops, layers from lists, fused
matrices from torch.cat.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_rl.protocols import Parameters
from megatron_rl.weight_sync.planner.flows import Stream
from megatron_rl.weight_sync.planner.plan import Plan
from megatron_rl.weight_sync.planner.program import compile_program
from megatron_rl.weight_sync.planner.roles import Side
from megatron_rl.weight_sync.transport import pack, strided, unpack
from tests.unit.weight_sync.training_tables import TrainLayout
from tools.planning.engine_tables import ModelShape, RolloutLayout

UNWRITTEN = -77.0  # what a destination holds before the sync, and its vocabulary padding after it
CPU = torch.device("cpu")
QWEN, MIXTRAL = ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")


def hf_tensors(model: ModelShape, seed: int = 0) -> dict[str, Tensor]:
    """A whole model of random weights under its HF names."""
    draw = torch.Generator().manual_seed(seed)
    shapes = {
        "model.embed_tokens.weight": (model.vocab, model.hidden),
        "model.norm.weight": (model.hidden,),
    }
    if not model.tied:
        shapes["lm_head.weight"] = (model.vocab, model.hidden)
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    for layer in range(model.layers):
        p = f"model.layers.{layer}."
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            shapes[f"{p}self_attn.{name}_proj.weight"] = (rows, model.hidden)
            if model.qkv_bias:
                shapes[f"{p}self_attn.{name}_proj.bias"] = (rows,)
        shapes[p + "self_attn.o_proj.weight"] = (model.hidden, q)
        if model.qk_norm:
            shapes[p + "self_attn.q_norm.weight"] = shapes[p + "self_attn.k_norm.weight"] = (
                model.head_dim,
            )
        shapes[p + "input_layernorm.weight"] = shapes[p + "post_attention_layernorm.weight"] = (
            model.hidden,
        )
        if layer in model.dense_layers or not model.experts:
            shapes.update(_mlp(p + "mlp.", model.ffn, model.hidden))
            continue
        if model.expert_names == "mixtral":
            shapes[p + "block_sparse_moe.gate.weight"] = (model.experts, model.hidden)
            for e in range(model.experts):
                shapes.update(
                    _mlp(f"{p}block_sparse_moe.experts.{e}.", model.moe_ffn, model.hidden, MIXTRAL)
                )
            continue
        shapes[p + "mlp.gate.weight"] = (model.experts, model.hidden)
        for e in range(model.experts):
            shapes.update(_mlp(f"{p}mlp.experts.{e}.", model.moe_ffn, model.hidden))
        if model.shared_ffn:
            shapes.update(_mlp(p + "mlp.shared_expert.", model.shared_ffn, model.hidden))
            shapes[p + "mlp.shared_expert_gate.weight"] = (1, model.hidden)
    return {
        name: torch.randn(shape, generator=draw).to(getattr(torch, model.dtype))
        for name, shape in shapes.items()
    }


def _mlp(
    prefix: str, ffn: int, hidden: int, names: tuple[str, str, str] = QWEN
) -> dict[str, tuple[int, ...]]:
    gate, up, down = (f"{prefix}{name}.weight" for name in names)
    return {gate: (ffn, hidden), up: (ffn, hidden), down: (hidden, ffn)}


def train_ranks(layout: TrainLayout) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Per rank: (stage, tensor-parallel rank), and (expert-parallel rank, expert-tensor-parallel
    rank)."""
    dense = [
        (p, t)
        for p in range(layout.pp)
        for _ in range(layout.dp)
        for _ in range(layout.cp)
        for t in range(layout.tp)
    ]
    edp = layout.tp * layout.cp * layout.dp // (layout.ep * layout.etp)
    expert = [
        (e, t)
        for _ in range(layout.pp)
        for _ in range(edp)
        for e in range(layout.ep)
        for t in range(layout.etp)
    ]
    return dense, expert


def stage_layers(model: ModelShape, layout: TrainLayout) -> list[list[list[int]]]:
    """Layers of each chunk of each stage."""
    first, last = layout.first_layers, layout.last_layers
    ends = (first is not None) + (last is not None)
    middle = (model.layers - (first or 0) - (last or 0)) // max(layout.pp - ends, 1)
    sizes = [middle] * layout.pp
    if first is not None:
        sizes[0] = first
    if last is not None:
        sizes[-1] = last
    todo, stages = list(range(model.layers)), [[] for _ in sizes]
    for _ in range(layout.vpp):
        for stage, size in enumerate(sizes):
            count = size // layout.vpp
            stages[stage].append(todo[:count])
            todo = todo[count:]
    assert not todo
    return stages


def _megatron_attention(
    full: Mapping[str, Tensor], model: ModelShape, layer: int, tp: int, t: int
) -> dict[str, Tensor]:
    p = f"model.layers.{layer}."
    out = {}
    for kind in ("weight", "bias") if model.qkv_bias else ("weight",):
        parts = [full[f"{p}self_attn.{x}_proj.{kind}"] for x in "qkv"]
        by_group = [x.view(model.kv_heads, -1, *x.shape[1:]) for x in parts]
        rows = torch.cat(by_group, dim=1).flatten(0, 1)
        out[f"self_attention.linear_qkv.{kind}"] = rows.chunk(tp)[t]
    output = full[p + "self_attn.o_proj.weight"]
    out["self_attention.linear_proj.weight"] = output.chunk(tp, dim=1)[t]
    for x in "qk" if model.qk_norm else "":
        out[f"self_attention.{x}_layernorm.weight"] = full[f"{p}self_attn.{x}_norm.weight"]
    out["input_layernorm.weight"] = full[p + "input_layernorm.weight"]
    out["pre_mlp_layernorm.weight"] = full[p + "post_attention_layernorm.weight"]
    return out


def _megatron_mlp(
    full: Mapping[str, Tensor], prefix: str, parts: int, part: int, names: tuple[str, str, str]
) -> dict[str, Tensor]:
    gate, up, down = (full[f"{prefix}{name}.weight"] for name in names)
    return {
        "linear_fc1.weight": torch.cat([gate.chunk(parts)[part], up.chunk(parts)[part]]),
        "linear_fc2.weight": down.chunk(parts, dim=1)[part],
    }


def megatron_shards(
    full: Mapping[str, Tensor], model: ModelShape, layout: TrainLayout, rank: int
) -> dict[str, Tensor]:
    """The parameters of one Megatron rank. Vocabulary padding is NaN: it must reach nobody."""
    (stage, t), (e, et) = (ranks[rank] for ranks in train_ranks(layout))
    chunks = stage_layers(model, layout)[stage]
    out: dict[str, Tensor] = {}

    def vocabulary(name: str) -> Tensor:
        padding = -model.vocab % (layout.vocab_multiple * layout.tp)
        return F.pad(full[name], (0, 0, 0, padding), value=float("nan")).chunk(layout.tp)[t]

    def add(prefix: str, tensors: Mapping[str, Tensor]) -> None:
        out.update({prefix + name: tensor for name, tensor in tensors.items()})

    if stage == 0:
        out["0:embedding.word_embeddings.weight"] = vocabulary("model.embed_tokens.weight")
    for c, layers in enumerate(chunks):
        for i, layer in enumerate(layers):
            k, p = f"{c}:decoder.layers.{i}.", f"model.layers.{layer}."
            add(k, _megatron_attention(full, model, layer, layout.tp, t))
            if layer in model.dense_layers or not model.experts:
                add(k + "mlp.", _megatron_mlp(full, p + "mlp.", layout.tp, t, QWEN))
                continue
            mixtral = model.expert_names == "mixtral"
            block, names = ("block_sparse_moe.", MIXTRAL) if mixtral else ("mlp.", QWEN)
            out[k + "mlp.router.weight"] = full[f"{p}{block}gate.weight"]
            for j, expert in enumerate(torch.arange(model.experts).chunk(layout.ep)[e].tolist()):
                tensors = _megatron_mlp(full, f"{p}{block}experts.{expert}.", layout.etp, et, names)
                add(f"{k}mlp.experts.local_experts.{j}.", tensors)
            if model.shared_ffn:
                shared = _megatron_mlp(full, p + "mlp.shared_expert.", layout.tp, t, QWEN)
                add(k + "mlp.shared_experts.", shared)
                gate = full[p + "mlp.shared_expert_gate.weight"]
                out[k + "mlp.shared_experts.gate_weight"] = gate
    if stage == layout.pp - 1:
        last = f"{len(chunks) - 1}:"
        out[f"{last}decoder.final_layernorm.weight"] = full["model.norm.weight"]
        if not model.tied or layout.pp > 1:
            head = "model.embed_tokens.weight" if model.tied else "lm_head.weight"
            out[f"{last}output_layer.weight"] = vocabulary(head)
    return {key: value.contiguous().clone() for key, value in out.items()}


def _vllm_experts(
    full: Mapping[str, Tensor], model: ModelShape, layout: RolloutLayout, local: int, p: str
) -> dict[str, Tensor]:
    mixtral = model.expert_names == "mixtral"
    block, names = (p + "block_sparse_moe.", MIXTRAL) if mixtral else (p + "mlp.", QWEN)
    experts = torch.arange(model.experts)
    parts, part = layout.tp, local % layout.tp
    if layout.ep > 1:
        experts = torch.tensor_split(experts, layout.ep)[local % layout.ep]
        parts, part = 1, 0
    gate, up, down = (
        [full[f"{block}experts.{e}.{name}.weight"] for e in experts.tolist()] for name in names
    )
    w13 = [torch.cat([g.chunk(parts)[part], u.chunk(parts)[part]]) for g, u in zip(gate, up)]
    w2 = [d.chunk(parts, dim=1)[part] for d in down]
    return {
        block + "gate.weight": full[block + "gate.weight"],
        block + "experts.routed_experts.w13_weight": torch.stack(w13),
        block + "experts.routed_experts.w2_weight": torch.stack(w2),
    }


def vllm_shards(
    full: Mapping[str, Tensor], model: ModelShape, layout: RolloutLayout, rank: int
) -> dict[str, Tensor]:
    """The parameters of one vLLM worker; vocabulary padding is UNWRITTEN."""
    local = rank - layout.first_rank
    tp, t = layout.tp, local % layout.tp
    out: dict[str, Tensor] = {"model.norm.weight": full["model.norm.weight"]}
    for name in ("model.embed_tokens.weight", "lm_head.weight")[: 1 if model.tied else 2]:
        padding = -model.vocab % layout.vocab_multiple
        out[name] = F.pad(full[name], (0, 0, 0, padding), value=UNWRITTEN).chunk(tp)[t]

    def heads(x: Tensor) -> Tensor:
        """One key or value head per worker where there are more workers than heads."""
        by_head = x.view(model.kv_heads, -1, *x.shape[1:])
        repeated = by_head.repeat_interleave(max(1, tp // model.kv_heads), dim=0)
        return repeated.chunk(tp)[t].flatten(0, 1)

    def mlp(prefix: str) -> None:
        gate, up, down = (full[f"{prefix}{name}_proj.weight"] for name in ("gate", "up", "down"))
        out[prefix + "gate_up_proj.weight"] = torch.cat([gate.chunk(tp)[t], up.chunk(tp)[t]])
        out[prefix + "down_proj.weight"] = down.chunk(tp, dim=1)[t]

    for layer in range(model.layers):
        p = f"model.layers.{layer}."
        for kind in ("weight", "bias") if model.qkv_bias else ("weight",):
            q, k, v = (full[f"{p}self_attn.{x}_proj.{kind}"] for x in "qkv")
            out[f"{p}self_attn.qkv_proj.{kind}"] = torch.cat([q.chunk(tp)[t], heads(k), heads(v)])
        out[p + "self_attn.o_proj.weight"] = full[p + "self_attn.o_proj.weight"].chunk(tp, dim=1)[t]
        whole = ["input_layernorm", "post_attention_layernorm"]
        if model.qk_norm:
            whole += ["self_attn.q_norm", "self_attn.k_norm"]
        out.update({f"{p}{name}.weight": full[f"{p}{name}.weight"] for name in whole})
        if layer in model.dense_layers or not model.experts:
            mlp(p + "mlp.")
            continue
        out.update(_vllm_experts(full, model, layout, local, p))
        if model.shared_ffn:
            mlp(p + "mlp.shared_expert.")
            out[p + "mlp.shared_expert_gate.weight"] = full[p + "mlp.shared_expert_gate.weight"]
    return {key: value.contiguous().clone() for key, value in out.items()}


def simulate(
    plan: Plan,
    sources: Side,
    targets: Side,
    train: Mapping[int, Mapping[str, Tensor]],
    rollout: Mapping[int, Mapping[str, Tensor]],
) -> dict[str, int]:
    """Carry out the programs of all ranks in one process, round by round; bytes that crossed
    between ranks, and copied bytes. Every message must be received in the round in which it is
    sent, and every parameter completed exactly once.
    """
    programs = {
        rank: compile_program(plan, rank, sources.get(rank, []), targets.get(rank, []))
        for rank in sorted({*sources, *targets})
    }
    left = {rank: dict(program.uses) for rank, program in programs.items()}
    moved = {"sent": 0, "copied": 0}

    def done(rank: int, key: str) -> None:
        left[rank][key] -= 1

    for number in range(plan.schedule.rounds):
        wire: dict[Stream, list[Tensor]] = defaultdict(list)
        now = {
            rank: step
            for rank, program in programs.items()
            for step in program.rounds
            if step.number == number
        }
        for rank, step in now.items():
            for message in step.sends:
                buffer = torch.empty(message.size, dtype=torch.uint8)
                uses = partial(done, rank) if message.passed_on else lambda key: None
                kept = rollout if message.passed_on else train
                pack(message, tensors(kept[rank]), buffer, uses)
                wire[message.stream].append(buffer)
        for rank, step in now.items():
            for message in step.receives:
                buffer = wire[message.stream].pop(0)
                moved["sent"] += buffer.numel()
                unpack(message, buffer, tensors(rollout[rank]), partial(done, rank))
        assert not any(wire.values()), "a message was sent and not received in its round"
    for rank, program in programs.items():
        for copy in program.copies:
            target = strided(rollout[rank][copy.target.key], copy.target)
            target.copy_(strided(train[rank][copy.source.key], copy.source))
            moved["copied"] += target.numel() * target.element_size()
            done(rank, copy.target.key)
    assert not any(count for counts in left.values() for count in counts.values())
    return moved


def tensors(parameters: Mapping[str, Tensor]) -> Parameters:
    """The lookup of a plain mapping. Raises ValueError naming a key that it lacks."""

    def get(key: str) -> Tensor:
        if key not in parameters:
            raise ValueError(
                f"parameter {key!r} is in the plan but not among the {len(parameters)} parameters"
                " of this process"
            )
        return parameters[key]

    return get
