"""Phases of the resume test, each in processes of its own: ``write`` trains 2 updates, saves,
trains 2 more and records every bit (and exports the untrained model); ``read`` loads and must
record the same bits; ``reshape`` and ``moved`` load what another layout wrote; ``gathered``
compares with the plain way of writing; ``converted`` reads checkpoints
made of HF directories; ``measured`` compares planned with allocated memory.
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.utils import get_attr_wrapped_model
from safetensors.torch import load_file

from megatron_rl.config.load import compose
from megatron_rl.config.number_formats import ITEM_BYTES
from megatron_rl.config.schema import (
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    PrecisionConfig,
    RolloutConfig,
)
from megatron_rl.planning import memory
from megatron_rl.planning.workload import Workload
from megatron_rl.policy import checkpoint
from megatron_rl.policy.activations import layer_activations
from megatron_rl.policy.export import export_hf
from megatron_rl.policy.megatron_policy import MegatronPolicy
from megatron_rl.policy.optimizer import create_state, parts
from megatron_rl.policy.settings import PolicySettings
from megatron_rl.runtime.device import platform
from megatron_rl.runtime.launch import gather_objects
from megatron_rl.types import LossOutput, SequenceBatch, TokenView
from tests import zoo
from tests.numerics.checkpoint_arrays import same_arrays
from tests.numerics.checkpoint_cases import CASES, CONVERTED, MEASURED, MOVES, RESHAPES, Case
from tests.numerics.policy_state import record
from tools.bench import gathered_checkpoint

FOLDER = Path(sys.argv[2])
OPTIM = OptimConfig(
    learning_rate=3e-3,
    min_learning_rate=1e-4,
    schedule="cosine",
    warmup_steps=2,
    weight_decay=0.1,
    beta1=0.9,
    beta2=0.95,
    eps=1e-8,
    clip_grad=1.0,
)


def precision(case: Case) -> PrecisionConfig:
    return PrecisionConfig(**{**compose("precision/fp32"), "params": case.dtype})


def build(case: Case) -> MegatronPolicy:
    defaults = compose("config", ["parallel=single", "precision=fp32"])
    layout = {**defaults["parallel"], "distributed_optimizer": False, **case.layout}
    return MegatronPolicy(
        ModelConfig(path=str(FOLDER / case.model), make_vocab_divisible_by=8, freeze_vision=False),
        ParallelConfig(**layout),
        precision(case),
        OPTIM,
        PolicySettings(
            temperature=0.9,
            keep_reference=case.reference,
            total_optimizer_steps=6,
            max_sequence_tokens=64,
            tokens_per_microbatch=64,
        ),
    )


def batch(step: int) -> SequenceBatch:
    g = torch.Generator().manual_seed(100 + step)
    prompts = torch.randint(2, 6, (8,), generator=g)
    responses = torch.randint(3, 12, (8,), generator=g)
    num_tokens = int((prompts + responses).sum())
    return SequenceBatch(torch.randint(3, 123, (num_tokens,), generator=g), prompts, responses)


def shares(policy: MegatronPolicy, count: int) -> list[list[int]]:
    """The 8 rows of a batch, shared by the data-parallel ranks in ``count`` micro-batches each."""
    rows = torch.arange(8).chunk(policy.data_parallel_size)[policy.data_parallel_rank]
    return [part.tolist() for part in rows.chunk(count)]


def update(policy: MegatronPolicy, step: int) -> float:
    """One optimizer step on ``batch(step)``."""
    data = batch(step)
    weights = torch.randn(
        int(data.response_lengths.sum()), generator=torch.Generator().manual_seed(step)
    )

    def loss(view: TokenView) -> LossOutput:
        value = -(view.logprobs * weights[view.index]).sum() / weights.numel()
        return LossOutput(value, {})

    result = policy.update_microbatches(data, shares(policy, 4), loss)
    assert not result.skipped
    return result.grad_norm


def trajectory(policy: MegatronPolicy, steps: range) -> dict[str, Any]:
    norms = [update(policy, step) for step in steps]
    logprobs = zoo.of_all_rows(policy.score_microbatches(batch(9), shares(policy, 2))).logprobs
    return {
        "norms": norms,
        "logprobs": logprobs,
        "state": record(policy),
        "optimizer_steps": policy.optimizer_steps,
    }


def export(policy: MegatronPolicy, case: Case) -> None:
    """A model that was read and not trained leaves as it came, bit for bit, in one file or in
    several."""
    source = FOLDER / case.model
    path = FOLDER / "exported" / case.name
    export_hf(policy, path, max_file_bytes=100_000)
    export_hf(policy, path.with_name(f"{case.name}_whole"))
    if dist.get_rank() == 0:
        want = load_file(source / "model.safetensors")
        index = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
        files = {file: load_file(path / file) for file in set(index.values())}
        assert len(files) > 3 and sorted(index) == sorted(want)
        whole = load_file(path.with_name(f"{case.name}_whole") / "model.safetensors")
        for got in ({name: files[file][name] for name, file in index.items()}, whole):
            assert sorted(got) == sorted(want) and all(
                torch.equal(got[name], want[name]) for name in want
            ), f"{case.name}: export"
        assert json.loads((path / "config.json").read_text()) == json.loads(
            (source / "config.json").read_text()
        )
        assert (path / "generation_config.json").read_bytes() == (
            source / "generation_config.json"
        ).read_bytes()


def written_evenly(path: Path) -> None:
    """Data-parallel ranks write equally many bytes, whatever they hold in common."""
    sizes = [
        sum(file.stat().st_size for file in path.glob(f"__{rank}_*.distcp"))
        for rank in range(dist.get_world_size())
    ]
    assert max(sizes) <= 1.05 * sum(sizes) / len(sizes), f"{path}: {sizes} bytes by rank"


def write(case: Case) -> None:
    policy = build(case)
    checkpoint.WRITER_THREADS["cpu"] = 4 if case.name == "dp2_bf16" else 1
    if case.dtype == "float32":
        export(policy, case)
    # An optimizer that has not stepped can be saved too.
    policy.save(FOLDER / case.name / "step_000000", {"step": 0})
    start = trajectory(policy, range(1))
    torch.save(start, FOLDER / f"{case.name}.{dist.get_rank()}.start.pt")
    update(policy, 1)
    before = record(policy)
    policy.save(
        FOLDER / case.name / "step_000002",
        {"step": 2, "state": (1, "x"), "tensor": torch.arange(3)},
    )
    assert all(torch.equal(a, b) for a, b in zip(before, record(policy), strict=True)), (
        f"{case.name}: saving changed the state"
    )
    written = list((FOLDER / case.name / "step_000002").glob("__0_*.distcp"))
    assert len(written) == checkpoint.WRITER_THREADS["cpu"], f"{case.name}: {written} of rank 0"
    assert all(file.stat().st_size for file in written), f"{case.name}: an empty file"
    if case.layout.get("distributed_optimizer") and dist.get_world_size() == 2:
        written_evenly(FOLDER / case.name / "step_000002")
    torch.save(trajectory(policy, range(2, 4)), FOLDER / f"{case.name}.{dist.get_rank()}.end.pt")
    policy.close()


def compare(case: Case, got: dict[str, Any], phase: str) -> None:
    want = torch.load(FOLDER / f"{case.name}.{dist.get_rank()}.{phase}.pt")
    assert got["norms"] == want["norms"], (
        f"{case.name} {phase}: gradient norms {got['norms']} after the load, "
        f"{want['norms']} without"
    )
    assert got["optimizer_steps"] == want["optimizer_steps"]
    assert torch.equal(got["logprobs"], want["logprobs"]), f"{case.name} {phase}: logprobs"
    different = [
        i
        for i, (a, b) in enumerate(zip(got["state"], want["state"], strict=True))
        if a.dtype != b.dtype or not torch.equal(a, b)
    ]
    assert not different, (
        f"{case.name} {phase}: {len(different)} of {len(want['state'])} tensors of the state differ"
    )


def read(case: Case) -> None:
    policy = build(case)
    update(policy, 7)  # whatever was there must be replaced
    if policy.reference is not None:
        policy.reference.assign(
            {name: torch.zeros_like(tensor) for name, tensor in policy.reference.tensors().items()}
        )
    extra = policy.load(FOLDER / case.name / "step_000002")
    assert (
        extra["step"] == 2 and extra["state"] == (1, "x") and extra["tensor"].tolist() == [0, 1, 2]
    )
    compare(case, trajectory(policy, range(2, 4)), "end")
    # From before the first update.
    assert policy.load(FOLDER / case.name / "step_000000") == {"step": 0}
    compare(case, trajectory(policy, range(1)), "start")
    policy.close()


def reshape(source: str, case: Case) -> None:
    policy = build(case)
    policy.load(FOLDER / source / "step_000002")
    got = trajectory(policy, range(2, 4))
    want = torch.load(FOLDER / f"{source}.0.end.pt")
    for a, b in zip(got["norms"], want["norms"], strict=True):
        assert math.isclose(a, b, rel_tol=1e-5), (
            f"{source} -> {case.name}: gradient norms {got['norms']}, were {want['norms']}"
        )
    difference = (got["logprobs"] - want["logprobs"]).abs().max().item()
    assert difference <= 2e-5, f"{source} -> {case.name}: logprobs off by {difference}"
    policy.close()


def moved(source: str, case: Case) -> None:
    """Weights, optimizer and reference are the same bits in another layout: what one wrote, the
    other has read, and has written again. On the way the weights change behind a writer's back."""
    policy = build(case)
    policy.load(FOLDER / source / "step_000002")
    path = FOLDER / "moved" / f"{source}_{case.name}"
    saving = policy.start_save(path, {"step": 2})
    update(policy, 5)
    assert saving.check(gather_objects, wait=True)
    if dist.get_rank() == 0:
        same_arrays(path, FOLDER / source / "step_000002")
    dist.barrier()
    policy.close()


def gathered(case: Case) -> None:
    """The plain way, in which one rank writes and all read everything, gives the same bits: each
    way reads what the other has written. It wrote without digests once."""
    policy = build(case)
    update(policy, 0)
    update(policy, 1)
    plain, shares = FOLDER / "plain" / case.name, FOLDER / "shares" / case.name
    gathered_checkpoint.save(policy, plain, {"step": 2}, digests=False)
    policy.save(shares, {"step": 2})
    want = trajectory(policy, range(2, 4))
    if dist.get_rank() == 0:
        same_arrays(plain, shares)
    dist.barrier()
    for load in (
        lambda: policy.load(plain),
        lambda: gathered_checkpoint.load(policy, shares),
        lambda: policy.load(shares),
    ):
        update(policy, 7)  # whatever was there must be replaced
        assert load()["step"] == 2
        torch.save(want, FOLDER / f"{case.name}.{dist.get_rank()}.plain.pt")
        compare(case, trajectory(policy, range(2, 4)), "plain")
    policy.close()


def converted(case: Case) -> None:
    """What tools/convert_checkpoint.py made of the HF directory, read by megatron, is what the
    policy reads from that directory."""
    policy = build(case)
    want = [item.tensor.detach().clone() for item in policy.held]
    with torch.no_grad():
        for item in policy.held:
            item.tensor.fill_(7.0)
        state = [module.sharded_state_dict(metadata={}) for module in policy.modules]
        folder = str(FOLDER / f"{case.model}_converted")
        loaded = dist_checkpointing.load(dict(enumerate(state)), folder)
        for chunk, module in enumerate(policy.modules):
            module.load_state_dict(loaded[chunk])
    for item, tensor in zip(policy.held, want, strict=True):
        kept = slice(None)
        if case.model == "llama" and item.parameter.slot.kind == "vocab":
            # Not the padding: the model has 123 tokens.
            first_row = policy.ranks.tensor_rank * tensor.shape[0]
            kept = slice(0, max(0, min(123 - first_row, tensor.shape[0])))
        assert torch.equal(item.tensor[kept], tensor[kept]), f"{case.name}: {item.name}"
    policy.close()


def saved_bytes(policy: MegatronPolicy) -> tuple[int, int]:
    """(bytes that the second layer really keeps for its backward, tokens)."""
    microbatch = policy.batching.packed(batch(0), shares(policy, 1))[0]
    known = {tensor.untyped_storage().data_ptr() for tensor in policy.modules[0].parameters()}
    storages: dict[int, int] = {}
    alive: list[Any] = []  # else an address could be used twice
    counted: list[int] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            storages[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    layer = get_attr_wrapped_model(
        policy.modules[0], "decoder", return_model_obj=True
    ).decoder.layers[1]
    layer.register_forward_pre_hook(lambda *_: storages.clear())
    layer.register_forward_hook(lambda *_: counted.append(sum(storages.values())))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), platform():
        policy.modules[0](
            input_ids=microbatch.token_ids,
            position_ids=microbatch.position_ids,
            attention_mask=None,
            packed_seq_params=microbatch.packing,
        )
    return counted[0], microbatch.token_ids.numel()


def measured(case: Case) -> None:
    """The planned memory is within a tenth of what is really allocated."""
    policy = build(case)
    rollout = RolloutConfig(**{**compose("rollout/vllm"), "kv_cache_gib": 1.0, "stop": ()})
    load = Workload(2, 1024, 1024, logprob_chunk_tokens=256, make_vocab_divisible_by=8, fused=False)
    stages = memory.plan(policy.arch, policy.parallel, precision(case), rollout, load, 1.0)
    planned = stages[policy.ranks.pipeline_rank]
    create_state(policy.optimizer)
    states = 0
    for part in parts(policy.optimizer):
        for parameter, state in part.optimizer.state.items():
            states += sum(state[key].nbytes for key in ("exp_avg", "exp_avg_sq"))
            states += parameter.nbytes if case.dtype == "bfloat16" else 0
    buffers = [buffer for chunk in policy.chunks for buffer in chunk.buffers]
    pairs = {
        "weights": (planned.weights, sum(item.tensor.nbytes for item in policy.held)),
        "gradients": (planned.gradients, sum(buffer.grad_data.nbytes for buffer in buffers)),
        "optimizer": (planned.optimizer, states),
    }
    if policy.ranks.pipeline == 1:
        saved, tokens = saved_bytes(policy)
        element = ITEM_BYTES[case.dtype]
        pairs["activations"] = (
            layer_activations(policy.arch, policy.parallel, tokens, element, fused=False),
            saved,
        )
    for what, (plan, real) in pairs.items():
        assert 0.9 <= plan / real <= 1.1, f"{case.name}: {what} planned {plan}, allocated {real}"
    policy.close()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    phase = sys.argv[1]
    only = sys.argv[3:]
    layouts = {"reshape": (reshape, RESHAPES), "moved": (moved, MOVES[dist.get_world_size()])}
    if phase in layouts:
        change, pairs = layouts[phase]
        work = [
            (f"{source} -> {case.name}", lambda s=source, c=case: change(s, c))
            for source, case in pairs
        ]
    else:
        action = {
            "write": write,
            "read": read,
            "gathered": gathered,
            "converted": converted,
            "measured": measured,
        }[phase]
        of_phase = {"converted": CONVERTED, "measured": MEASURED}
        cases = of_phase.get(phase) or CASES[dist.get_world_size()]
        work = [(case.name, lambda c=case: action(c)) for case in cases]
    for name, run in work:
        if not only or name in only:
            run()
            if dist.get_rank() == 0:
                print(f"OK {phase} {name}", flush=True)
    dist.destroy_process_group()
