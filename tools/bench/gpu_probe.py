"""The calls on which everything else on a GPU stands, each tried once: a line PASS, FAIL or SKIP
for every one, in under 4 minutes.

    python tools/bench/gpu_probe.py --folder DIR [--only NAME,NAME] [--json FILE]

Run it first on a new machine or with new versions. What needs CUDA says SKIP, with the reason,
where there is none. Exit code 1 when one failed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from gpu_model import (
    build_policy,
    host_waits,
    policy_gradient,
    random_batch,
    read_config,
    write_model,
)
from torch import Tensor

from megatron_rl.config.cli.parser import parser_of
from megatron_rl.passes import LocalBatch
from megatron_rl.policy.hardware import this_machine
from megatron_rl.policy.megatron_policy import MegatronPolicy
from megatron_rl.policy.passes.logprobs import Head, token_values
from megatron_rl.policy.state.offload import Offload
from megatron_rl.runtime import launch
from megatron_rl.runtime.device import device, platform

GIB = 2**30
# A model of a few megabytes whose head dimension (64) the fused kernels take.
TINY = dict(hidden=512, ffn=1024, heads=8, kv_heads=4, vocab=2048)
SEQUENCES, LENGTH = 4, 128


class Absent(Exception):
    """What a probe needs is not on this machine; the text says what."""


def need_cuda() -> None:
    if not torch.cuda.is_available():
        raise Absent("no CUDA device")


def need_transformer_engine() -> None:
    need_cuda()
    if this_machine().transformer_engine is None:
        raise Absent(
            "Transformer Engine is not installed, or cannot be imported; see the probe"
            " transformer_engine"
        )


def close(found: Tensor, expected: Tensor, limit: float) -> float:
    """Largest difference over the largest expected value. Raises AssertionError above ``limit``."""
    scale = expected.double().abs().max().clamp(min=1e-30)
    error = ((found.double() - expected.double()).abs().max() / scale).item()
    assert error <= limit, f"relative difference {error:.2e}, more than {limit:g}"
    return error


def accumulated_product(_: argparse.Namespace) -> str:
    """A product of 16-bit operands added to a float32 result that is also the summand."""
    need_cuda()
    draw = torch.Generator(device()).manual_seed(0)
    left, right = (
        torch.randn(256, 256, generator=draw, device=device()).bfloat16() for _ in range(2)
    )
    start = torch.randn(256, 256, generator=draw, device=device())
    out = start.clone()
    torch.addmm(out, left, right, out_dtype=torch.float32, out=out)
    error = close(out, start.double() + left.double() @ right.double(), 1e-5)
    return f"torch.addmm(out, a, b, out_dtype=float32, out=out), relative error {error:.1e}"


def head_gradient(_: argparse.Namespace) -> str:
    """Logprobs and both gradients of the output layer in bfloat16, against float64."""
    draw = torch.Generator(device()).manual_seed(0)
    hidden = torch.randn(300, 128, generator=draw, device=device()).bfloat16()
    weight = (torch.randn(512, 128, generator=draw, device=device()) * 128**-0.5).bfloat16()
    targets = torch.randint(500, (300,), generator=draw, device=device())
    results = []
    for dtype in (torch.bfloat16, torch.float64):
        leaves = [tensor.to(dtype, copy=True).requires_grad_() for tensor in (hidden, weight)]
        logprobs = token_values(*leaves, targets, Head(0.7, 500, 128, None)).logprobs
        (
            logprobs * torch.linspace(-1, 1, 300, device=device(), dtype=logprobs.dtype)
        ).sum().backward()
        results.append([logprobs.detach(), *[leaf.grad for leaf in leaves]])
    errors = [close(found, expected, 0.02) for found, expected in zip(*results, strict=True)]
    return "relative errors of logprobs and gradients " + ", ".join(
        f"{error:.1e}" for error in errors
    )


def emptied_storage(options: argparse.Namespace) -> str:
    """Weights, gradients and optimizer states leave the device and come back under the views that
    megatron keeps of them."""
    policy = tiny_policy(options, 2)
    policy.update(LocalBatch(*work()), policy_gradient)
    before = [item.tensor.detach().clone() for item in policy.held]
    there = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    policy.offload(("optimizer", "gradients", "weights"))
    freed = there - torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    policy.reload()
    assert all(
        torch.equal(item.tensor, want) for item, want in zip(policy.held, before, strict=True)
    ), "weights changed"
    policy.update(LocalBatch(*work()), policy_gradient)
    assert not all(
        torch.equal(item.tensor, old) for item, old in zip(policy.held, before, strict=True)
    ), "the update is lost"
    # bfloat16 weights, float32 gradients, float32 copies and two moments
    held = 18 * sum(tensor.numel() for tensor in before)
    policy.close()
    if torch.cuda.is_available():
        assert freed >= 0.9 * held, f"{freed / 2**20:.0f} of {held / 2**20:.0f} MiB freed"
        return f"{freed / 2**20:.0f} of {held / 2**20:.0f} MiB left the device and came back"
    return "weights are the same after they were away; an update uses them"


def transformer_engine(_: argparse.Namespace) -> str:
    """It is there and can be imported; on a machine with CUDA the pinned stack has it."""
    need_cuda()
    import transformer_engine as engine
    import transformer_engine.pytorch  # the torch part is a build of its own

    return f"version {engine.__version__}, Adam of {this_machine().adam}"


def rotated(heads: Tensor, angles: Tensor) -> Tensor:
    """Rotary positions by hand: ``[tokens, heads, dim]`` of one sequence, angles ``[tokens,
    dim]``."""
    first, second = heads.chunk(2, dim=-1)
    return (
        heads * angles.cos()[:, None] + torch.cat([-second, first], dim=-1) * angles.sin()[:, None]
    )


def attention_by_hand(
    query: Tensor, key: Tensor, value: Tensor, angles: Tensor, lengths: list[int]
) -> Tensor:
    """Causal attention of each packed sequence by itself, positions from 0 in each."""
    outputs = []
    for q, k, v in zip(*(tensor.split(lengths) for tensor in (query, key, value)), strict=True):
        here = angles[: len(q)]
        parts = (rotated(q, here), rotated(k, here), v)
        q, k, v = (part.transpose(0, 1)[None] for part in parts)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs).flatten(1)


def packed_attention(_: argparse.Namespace) -> str:
    """Transformer Engine's attention and fused rotary positions over packed sequences, against
    torch's over each."""
    need_transformer_engine()
    import transformer_engine.pytorch as te
    from megatron.core.extensions.transformer_engine import fused_apply_rotary_pos_emb_thd

    lengths, heads, groups, dim = [5, 64, 131, 256], 8, 4, 64
    draw = torch.Generator(device()).manual_seed(0)
    shapes = [(sum(lengths), count, dim) for count in (heads, groups, groups)]
    leaves = [torch.randn(shape, generator=draw, device=device()).bfloat16() for shape in shapes]
    frequencies = 10000.0 ** (-torch.arange(0, dim, 2, device=device()).float() / dim)
    angles = torch.arange(max(lengths), device=device()).float()[:, None] * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    ends = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(torch.int32).to(device())
    core = te.DotProductAttention(
        heads, dim, num_gqa_groups=groups, qkv_format="thd", attn_mask_type="padding_causal"
    )
    found = [leaf.clone().requires_grad_() for leaf in leaves]
    query, key = (
        fused_apply_rotary_pos_emb_thd(leaf, ends, angles[:, None, None]) for leaf in found[:2]
    )
    longest = max(lengths)
    out = core(
        query,
        key,
        found[2],
        qkv_format="thd",
        attn_mask_type="padding_causal",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    expected = [leaf.float().requires_grad_() for leaf in leaves]
    plain = attention_by_hand(*expected, angles, lengths)
    direction = torch.randn(plain.shape, generator=draw, device=device())
    (out.float() * direction).sum().backward()
    (plain * direction).sum().backward()
    errors = [close(out, plain, 0.03)]
    errors += [
        close(leaf.grad, want.grad, 0.05) for leaf, want in zip(found, expected, strict=True)
    ]
    return "relative errors of output and gradients of q, k, v " + ", ".join(
        f"{error:.1e}" for error in errors
    )


def clipped_gradients(_: argparse.Namespace) -> str:
    """megatron scales gradients of many parameters at once by what their norm is too large."""
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

    parameters = [
        torch.nn.Parameter(torch.zeros(size, device=device())) for size in (7, 1000, 4096)
    ]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 3.0)
    norm = 3.0 * sum(parameter.numel() for parameter in parameters) ** 0.5
    with platform():
        clip_grad_by_total_norm_fp32(parameters, max_norm=1.0, total_norm=norm)
    for parameter in parameters:
        close(parameter.grad, torch.full_like(parameter, 3.0 / norm), 1e-4)
    return f"norm {norm:.1f} became 1"


def fused_adam(_: argparse.Namespace) -> str:
    """One step of the Adam that megatron takes, against torch's."""
    need_transformer_engine()
    from megatron.core.optimizer import Adam

    draw = torch.Generator(device()).manual_seed(0)
    start, gradient = (torch.randn(10000, generator=draw, device=device()) for _ in range(2))
    ends = []
    for make in (Adam, torch.optim.AdamW):
        parameter = torch.nn.Parameter(start.clone())
        parameter.grad = gradient.clone()
        make([parameter], lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1).step()
        ends.append(parameter.detach())
    return f"{Adam.__module__}, relative difference from torch's {close(*ends, 1e-5):.1e}"


def pinned_memory(_: argparse.Namespace) -> str:
    """Host memory that a copy of 1.1 GiB takes: torch rounds page-locked memory up to a power of
    two, offloading must not."""
    need_cuda()
    num_bytes = int(1.1 * GIB)
    tensor = torch.zeros(num_bytes, dtype=torch.uint8, device=device())
    offload = Offload({"weights": lambda: [tensor]}, (), device())
    taken = [torch.cuda.host_memory_stats()["allocated_bytes.current"]]
    offload.offload(("weights",))
    taken.append(torch.cuda.host_memory_stats()["allocated_bytes.current"])
    offload.reload()
    whole = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    taken.append(torch.cuda.host_memory_stats()["allocated_bytes.current"])
    del whole
    ours, plain = (taken[1] - taken[0]) / GIB, (taken[2] - taken[1]) / GIB
    assert ours <= 1.2, (
        f"offloading 1.1 GiB took {ours:.2f} GiB of pinned memory (one tensor of that size"
        f" {plain:.2f} GiB)"
    )
    return (
        f"offloading 1.1 GiB took {ours:.2f} GiB of pinned memory, one tensor of that size"
        f" {plain:.2f} GiB"
    )


def waiting_host(options: argparse.Namespace) -> str:
    """Times that the host waits for the device in one update: as many with four layers as with
    two."""
    need_cuda()
    counts = {}
    for layers in (2, 4):
        policy = tiny_policy(options, layers)
        policy.update(LocalBatch(*work()), policy_gradient)  # the first one sets things up
        with host_waits() as found:
            policy.update(LocalBatch(*work()), policy_gradient)
        counts[layers] = found
        policy.close()
    totals = {layers: sum(found.values()) for layers, found in counts.items()}
    more = {
        where: count - counts[2][where]
        for where, count in counts[4].items()
        if count > counts[2][where]
    }
    assert totals[2] == totals[4], (
        f"{totals[2]} with 2 layers, {totals[4]} with 4; more of them at {more}"
    )
    shown = ", ".join(f"{where} ({count})" for where, count in counts[2].most_common(8))
    return f"{totals[2]} in an update, whatever the layers: {shown}"


def streams(options: argparse.Namespace) -> str:
    """Building the engine and generating leave the policy's stream the current one."""
    need_cuda()
    from megatron_rl.engine.engine import VllmEngine
    from megatron_rl.types import Prompt, Sampling

    model = tiny_model(options, 2)
    overrides = ["rollout.gpu_memory_utilization=0.2", "rollout.enforce_eager=true"]
    overrides += ["rollout.max_prompt_tokens=64", "rollout.max_response_tokens=64"]
    before = torch.cuda.current_stream()
    engine = VllmEngine(
        str(model), read_config(model, *overrides).rollout, seed=1, launch_id="gpu_probe"
    )
    assert torch.cuda.current_stream() == before, (
        f"{before} became {torch.cuda.current_stream()} when the engine was built"
    )
    engine.generate([Prompt("p", (3, 4, 5), "", "random")], Sampling(1, 8, seed=1))
    assert torch.cuda.current_stream() == before, (
        f"{before} became {torch.cuda.current_stream()} when it generated"
    )
    return f"{before} before and after"


def tiny_model(options: argparse.Namespace, layers: int) -> Path:
    return write_model(argparse.Namespace(folder=options.folder, layers=layers, **TINY))


def tiny_policy(options: argparse.Namespace, layers: int) -> MegatronPolicy:
    return build_policy(read_config(tiny_model(options, layers)), LENGTH)


def work() -> tuple[object, list[list[int]]]:
    """A batch and its micro-batches."""
    return random_batch(SEQUENCES, LENGTH, TINY["vocab"]), [[0, 1], [2, 3]]


# The engine last: it keeps memory, and what it leaves behind is not to decide about the others.
PROBES: tuple[Callable[[argparse.Namespace], str], ...] = (
    accumulated_product,
    head_gradient,
    emptied_storage,
    transformer_engine,
    packed_attention,
    clipped_gradients,
    fused_adam,
    pinned_memory,
    waiting_host,
    streams,
)


def tried(
    probe: Callable[[argparse.Namespace], str], options: argparse.Namespace
) -> dict[str, object]:
    """What came of one probe; whatever it raises is a failure and the next one is tried."""
    begin = time.perf_counter()
    try:
        outcome, detail = "PASS", probe(options)
    except Absent as reason:
        outcome, detail = "SKIP", str(reason)
    except Exception as error:  # noqa: BLE001 (it is the result)
        outcome, detail = "FAIL", f"{type(error).__name__}: {error}".splitlines()[0]
    print(f"{outcome} {probe.__name__}: {detail}", flush=True)
    return {
        "probe": probe.__name__,
        "outcome": outcome,
        "detail": detail,
        "seconds": time.perf_counter() - begin,
    }


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="where small models are written")
    parser.add_argument(
        "--only",
        help="names, separated by commas: " + ", ".join(probe.__name__ for probe in PROBES),
    )
    parser.add_argument("--json", type=Path, help="also write the outcomes there, after each")
    options = parser.parse_args()
    names = {probe.__name__ for probe in PROBES}
    wanted = names if options.only is None else set(options.only.split(","))
    if wanted - names:
        parser.error(
            f"--only: {', '.join(sorted(wanted - names))}: no such probe; there are"
            f" {', '.join(sorted(names))}"
        )
    launch.start()
    rows = []
    for probe in PROBES:
        if probe.__name__ in wanted:
            rows.append(tried(probe, options))
            if (
                options.json
            ):  # after each: a probe that ends the process leaves what was found before it
                options.json.write_text(json.dumps(rows, indent=1), encoding="ascii")
    return int(any(row["outcome"] == "FAIL" for row in rows))


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    launch.exit_process(code)
