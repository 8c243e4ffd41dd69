"""Resume is exact: 2 updates, save, NEW processes, load, 2 updates give the same bits as 4
updates. And checkpoints move into other layouts, with every bit."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megatron_rl.checkpoints import directory
from megatron_rl.policy.megatron_policy import MegatronPolicy
from megatron_rl.policy.state import checkpoint
from megatron_rl.policy.state.export import export_hf
from megatron_rl.runtime.launch import gather_objects
from tests.numerics import megatron_checkpoint
from tests.numerics.checkpoint_arrays import same_arrays
from tests.numerics.policy_state import record
from tests.numerics.small_policy import OVERLAPPED, SHARDED, Case, build, trajectory, update
from tests.ranks import call

STEP_0 = "step_000000"
STEP_2 = "step_000002"
LORA = {"rank": 4}
OF_ATTENTION = {"rank": 4, "targets": ["attention"]}
CASES = {
    2: [
        Case("adapters", {"tensor": 2, "sequence": True}, lora=LORA),
        Case("adapters_first_dense", {"expert": 2}, model="glm4_moe", lora=OF_ATTENTION),
        Case("adapters_sinks", {"expert": 2}, model="gpt_oss", lora=OF_ATTENTION),
        Case("adapters_fused", {"tensor": 2}, model="phi3", lora=LORA),
        Case(
            "adapters_latent",
            {"tensor": 2, "sequence": True},
            model="deepseek_v3",
            lora=OF_ATTENTION,
        ),
        Case("adapters_delta", {"tensor": 2, "sequence": True}, model="qwen3_5", lora=LORA),
        Case("tp2", {"tensor": 2, "sequence": True}, reference=True),
        Case("tp2_bf16", {"tensor": 2}, "bfloat16"),
        Case("dp2", SHARDED),
        Case("dp2_bf16", SHARDED, "bfloat16", reference=True),
        Case("dp2_overlap", OVERLAPPED, "bfloat16"),
        Case("pp2_tied", {"pipeline": 2}, model="qwen2_tied", reference=True),
        Case("ep2", {"expert": 2, **SHARDED}, model="qwen3_moe"),
        Case("experts", {"tensor": 2, "sequence": True}, model="qwen3_moe"),
        Case("first_dense", {"expert": 2, **SHARDED}, model="glm4_moe"),
        Case("first_dense_bf16", {"expert": 2}, "bfloat16", model="glm4_moe"),
        Case("latent", {"tensor": 2, "sequence": True}, model="deepseek_v3"),
        Case("sinks", {"tensor": 2, "sequence": True, "expert": 2}, model="gpt_oss"),
        Case("delta", {"tensor": 2, "sequence": True, "expert": 2}, model="qwen3_next"),
        Case("four_matrices", {"tensor": 2, "sequence": True}, model="qwen3_5"),
        Case("delta_bf16", {"context": 2, **SHARDED}, "bfloat16", model="qwen3_next"),
        Case("sinks_bf16", {"expert": 2, **SHARDED}, "bfloat16", model="gpt_oss"),
        Case("windows", {"tensor": 2, "sequence": True}, model="gemma3"),
        Case("heads_norm", {"tensor": 2, "sequence": True}, model="olmo3"),
        Case("fused_files", {"tensor": 2, "sequence": True}, model="phi3"),
        Case("windows_bf16", {"pipeline": 2}, "bfloat16", model="gemma3"),
    ],
    4: [
        Case("adapters_dp2", {"tensor": 2, **SHARDED}, lora=LORA),
        Case("tp2_pp2", {"tensor": 2, "pipeline": 2}, reference=True),
        Case(
            "tp2_pp2_bf16_vpp",
            {"tensor": 2, "pipeline": 2, "virtual_pipeline": 2, **SHARDED},
            "bfloat16",
        ),
        Case("tp2_dp2", {"tensor": 2, **SHARDED}, reference=True),
        Case("tp4_two_heads", {"tensor": 4}),  # two ranks share each key-value head
    ],
}
WHOLE = [case for case in CASES[2] if not case.lora]  # checkpoints with all weights
# Checkpoint of one case read into another layout (of 2 ranks).
RESHAPES = [
    ("adapters", Case("pp2", {"pipeline": 2}, lora=LORA)),
    ("adapters_first_dense", Case("pp2", {"pipeline": 2}, model="glm4_moe", lora=OF_ATTENTION)),
    ("adapters_fused", Case("pp2", {"pipeline": 2}, model="phi3", lora=LORA)),
    ("adapters_sinks", Case("pp2", {"pipeline": 2}, model="gpt_oss", lora=OF_ATTENTION)),
    ("adapters_latent", Case("pp2", {"pipeline": 2}, model="deepseek_v3", lora=OF_ATTENTION)),
    ("adapters_delta", Case("pp2", {"pipeline": 2}, model="qwen3_5", lora=LORA)),
    ("adapters_dp2", Case("dp2", SHARDED, lora=LORA)),
    ("tp2", Case("dp2", reference=True)),
    ("tp2", Case("pp2", {"pipeline": 2}, reference=True)),
    ("tp2_pp2", Case("tp2", {"tensor": 2}, reference=True)),
    ("tp2_dp2", Case("pp2", {"pipeline": 2, **SHARDED}, reference=True)),
    ("tp4_two_heads", Case("tp2", {"tensor": 2})),
    ("pp2_tied", Case("tp2", {"tensor": 2}, model="qwen2_tied", reference=True)),
    (
        "ep2",
        Case("tp2_ep2", {"tensor": 2, "sequence": True, "expert": 2, **SHARDED}, model="qwen3_moe"),
    ),
    ("ep2", Case("dp2", SHARDED, model="qwen3_moe")),
    ("experts", Case("ep2", {"expert": 2}, model="qwen3_moe")),
    ("first_dense", Case("pp2", {"pipeline": 2, **SHARDED}, model="glm4_moe")),
    ("latent", Case("pp2", {"pipeline": 2}, model="deepseek_v3")),
    ("sinks", Case("pp2", {"pipeline": 2}, model="gpt_oss")),
    ("delta", Case("pp2", {"pipeline": 2}, model="qwen3_next")),
    ("four_matrices", Case("pp2", {"pipeline": 2}, model="qwen3_5")),
    ("windows", Case("pp2", {"pipeline": 2}, model="gemma3")),
    ("heads_norm", Case("pp2", {"pipeline": 2}, model="olmo3")),
    ("fused_files", Case("pp2", {"pipeline": 2}, model="phi3")),
]

# Checkpoint of one case read into another layout, by number of ranks, and written again.
MOVES = {
    1: [
        ("dp2", Case("alone", SHARDED)),
        ("dp2_bf16", Case("alone", SHARDED, "bfloat16", reference=True)),
        ("tp2", Case("alone", reference=True)),
    ],
    2: [
        ("adapters", Case("pp2", {"pipeline": 2}, lora=LORA)),
        ("tp2", Case("pp2", {"pipeline": 2}, reference=True)),
        ("tp2", Case("dp2", reference=True)),
        ("tp2_bf16", Case("pp2", {"pipeline": 2}, "bfloat16")),
        ("dp2_bf16", Case("tp2", {"tensor": 2, **SHARDED}, "bfloat16", reference=True)),
        ("pp2_tied", Case("tp2", {"tensor": 2}, model="qwen2_tied", reference=True)),
        (
            "ep2",
            Case(
                "tp2_ep2",
                {"tensor": 2, "sequence": True, "expert": 2, **SHARDED},
                model="qwen3_moe",
            ),
        ),
        # Experts spread over ranks, which gives them an optimizer of their own, and not.
        ("ep2", Case("dp2", SHARDED, model="qwen3_moe")),
        ("experts", Case("ep2", {"expert": 2}, model="qwen3_moe")),
        ("first_dense_bf16", Case("pp2", {"pipeline": 2}, "bfloat16", model="glm4_moe")),
    ],
    4: [
        ("dp2_bf16", Case("tp2_dp2", {"tensor": 2, **SHARDED}, "bfloat16", reference=True)),
        ("ep2", Case("ep2_dp2", {"expert": 2, **SHARDED}, model="qwen3_moe")),
        ("tp2_bf16", Case("pp2_dp2", {"pipeline": 2}, "bfloat16")),
    ],
}


@pytest.fixture(scope="module")
def written(hf_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder that ``write`` leaves of the case with a name; made once."""
    folder = tmp_path_factory.mktemp("written")
    named = {case.name: (ranks, case) for ranks, cases in CASES.items() for case in cases}

    @cache
    def make(name: str) -> Path:
        ranks, case = named[name]
        call(ranks, write, hf_models, folder / name, case, timeout=200)
        return folder / name

    return make


OF_FULL_TIER = (
    *("tp2_bf16", "dp2", "dp2_bf16", "first_dense", "first_dense_bf16", "experts"),
    *(
        "latent",
        "delta",
        "heads_norm",
        "windows_bf16",
        "windows",
        "sinks",
        "delta_bf16",
        "sinks_bf16",
        "four_matrices",
        "fused_files",
    ),
    *(
        "adapters_fused",
        "adapters_first_dense",
        "adapters_sinks",
        "adapters_latent",
        "adapters_delta",
    ),
)


def each(cases: Any, *, full: bool = False) -> list[Any]:
    """(ranks, case), or (ranks, source, case), as parameters with names; those of four ranks, those
    whose number format and layout others have too, each beside something else, and, with ``full``,
    all of them belong to the full tier."""
    params = []
    for ranks, some in cases.items():
        for one in some:
            values = one if isinstance(one, tuple) else (one,)
            name = "_to_".join(getattr(value, "name", value) for value in values)
            is_full = full or ranks == 4 or name in OF_FULL_TIER
            marks = pytest.mark.full if is_full else ()
            params.append(pytest.param(ranks, *values, id=f"{ranks}_{name}", marks=marks))
    return params


@pytest.mark.parametrize(("ranks", "case"), each(CASES))
def test_new_processes_go_on_bit_for_bit(
    ranks: int, case: Case, hf_models: Path, written: Callable[[str], Path]
) -> None:
    """TP (also more of its ranks than key-value heads), DP with the distributed optimizer
    (overlapped too), PP with tied embeddings and interleaved, EP; fp32 and bf16."""
    folder = written(case.name)
    newest = directory.newest_valid(folder)
    assert newest == folder / STEP_2 and directory.problem(newest) is None
    call(ranks, read, hf_models, folder, case, timeout=200)


@pytest.mark.parametrize(("ranks", "source", "case"), each({2: RESHAPES}, full=True))
def test_training_goes_on_in_another_layout(
    ranks: int, source: str, case: Case, hf_models: Path, written: Callable[[str], Path]
) -> None:
    call(ranks, reshape, hf_models, written(source), case, timeout=200)


@pytest.mark.parametrize(("ranks", "case"), each({2: WHOLE}, full=True))
def test_the_plain_way_writes_and_reads_the_same_bits(
    ranks: int, case: Case, hf_models: Path, tmp_path: Path
) -> None:
    call(ranks, gathered, hf_models, tmp_path, case, timeout=200)


@pytest.mark.parametrize(("ranks", "source", "case"), each(MOVES, full=True))
def test_every_bit_moves_into_another_layout(
    ranks: int,
    source: str,
    case: Case,
    hf_models: Path,
    written: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    call(ranks, moved, hf_models, written(source), case, tmp_path / "moved", timeout=200)


def export(policy: MegatronPolicy, source: Path, path: Path) -> None:
    """A model that was read and not trained leaves as it came, bit for bit, in one file or in
    several."""
    weights = policy.gathered_weights()
    export_hf(weights, path, source, policy.arch, "float32", max_file_bytes=100_000)
    whole_path = path.with_name("exported_whole")
    policy.export(whole_path)
    if dist.get_rank() == 0:
        want = load_file(source / "model.safetensors")
        index = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
        files = {file: load_file(path / file) for file in set(index.values())}
        assert len(files) > 3 and sorted(index) == sorted(want)
        whole = load_file(whole_path / "model.safetensors")
        for got in ({name: files[file][name] for name, file in index.items()}, whole):
            assert sorted(got) == sorted(want) and all(
                torch.equal(got[name], want[name]) for name in want
            ), "export"
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


def write(models: Path, folder: Path, case: Case) -> None:
    """Trains 2 updates, saves, trains 2 more and notes every bit; exports the untrained model."""
    policy = build(models, case)
    checkpoint.WRITER_THREADS["cpu"] = 4 if case.name == "dp2_bf16" else 1
    if case.dtype == "float32":
        export(policy, models / case.model, folder / "exported")
    # An optimizer that has not stepped can be saved too.
    policy.save(folder / STEP_0, {"step": 0})
    start = trajectory(policy, range(1))
    torch.save(start, folder / f"{dist.get_rank()}.start.pt")
    update(policy, 1)
    before = record(policy)
    extra = {"step": 2, "state": (1, "x"), "tensor": torch.arange(3)}
    policy.save(folder / STEP_2, extra)
    assert all(torch.equal(a, b) for a, b in zip(before, record(policy), strict=True)), (
        "saving changed the state"
    )
    files = list((folder / STEP_2).glob("__0_*.distcp"))
    assert len(files) == checkpoint.WRITER_THREADS["cpu"], f"{files} of rank 0"
    assert all(file.stat().st_size for file in files), "an empty file"
    if case.layout.get("distributed_optimizer") and dist.get_world_size() == 2:
        written_evenly(folder / STEP_2)
    torch.save(trajectory(policy, range(2, 4)), folder / f"{dist.get_rank()}.end.pt")
    policy.close()


def compare(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert got["norms"] == want["norms"], (
        f"gradient norms {got['norms']} after the load, {want['norms']} without"
    )
    assert got["optimizer_steps"] == want["optimizer_steps"]
    assert torch.equal(got["logprobs"], want["logprobs"])
    different = [
        i
        for i, (a, b) in enumerate(zip(got["state"], want["state"], strict=True))
        if a.dtype != b.dtype or not torch.equal(a, b)
    ]
    assert not different, f"{len(different)} of {len(want['state'])} tensors of the state differ"


def read(models: Path, folder: Path, case: Case) -> None:
    policy = build(models, case)
    update(policy, 7)  # whatever was there must be replaced
    if policy.reference is not None:
        policy.reference.assign(
            {name: torch.zeros_like(tensor) for name, tensor in policy.reference.tensors().items()}
        )
    extra = policy.load(folder / STEP_2)
    assert extra["step"] == 2 and extra["state"] == (1, "x")
    assert extra["tensor"].tolist() == [0, 1, 2]
    rank = dist.get_rank()
    compare(trajectory(policy, range(2, 4)), torch.load(folder / f"{rank}.end.pt"))
    # From before the first update.
    assert policy.load(folder / STEP_0) == {"step": 0}
    compare(trajectory(policy, range(1)), torch.load(folder / f"{rank}.start.pt"))
    policy.close()


def reshape(models: Path, folder: Path, case: Case) -> None:
    policy = build(models, case)
    policy.load(folder / STEP_2)
    got = trajectory(policy, range(2, 4))
    want = torch.load(folder / "0.end.pt")
    for a, b in zip(got["norms"], want["norms"], strict=True):
        assert math.isclose(a, b, rel_tol=1e-5), (
            f"gradient norms {got['norms']}, were {want['norms']}"
        )
    difference = (got["logprobs"] - want["logprobs"]).abs().max().item()
    assert difference <= 2e-5, f"logprobs off by {difference}"
    policy.close()


def moved(models: Path, folder: Path, case: Case, path: Path) -> None:
    """Weights, optimizer and reference are the same bits in another layout: what one wrote, the
    other has read, and has written again. On the way the weights change behind a writer's back."""
    policy = build(models, case)
    policy.load(folder / STEP_2)
    saving = policy.start_save(path, {"step": 2})
    update(policy, 5)
    assert saving.check(gather_objects, wait=True)
    if dist.get_rank() == 0:
        same_arrays(path, folder / STEP_2)
    dist.barrier()
    policy.close()


def gathered(models: Path, folder: Path, case: Case) -> None:
    """The plain way, in which one rank writes and all read everything, gives the same bits: each
    way reads what the other has written."""
    policy = build(models, case)
    update(policy, 0)
    update(policy, 1)
    plain = folder / "plain"
    shares = folder / "shares"
    megatron_checkpoint.save(policy, plain, {"step": 2})
    policy.save(shares, {"step": 2})
    want = trajectory(policy, range(2, 4))
    if dist.get_rank() == 0:
        same_arrays(plain, shares)
    dist.barrier()
    for load in (
        lambda: policy.load(plain),
        lambda: megatron_checkpoint.load(policy, shares),
        lambda: policy.load(shares),
    ):
        update(policy, 7)  # whatever was there must be replaced
        assert load()["step"] == 2
        compare(trajectory(policy, range(2, 4)), want)
    policy.close()
