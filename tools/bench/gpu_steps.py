"""Whole steps of reinforcement learning on a random model: seconds of every part, tokens per
second, memory of every phase.

    python tools/bench/gpu_steps.py --folder DIR [--steps 12] [--nproc 1] \\
        [--override precision=fp8_tensorwise ...]

The model has the shape of a 1-1.5B one, the prompts are random letters, and almost every response
takes all its tokens, for a random model hardly ever ends one. Reward is an even number of letters
among the tokens: chance, so that there are gradients. The command is the one of every run;
parameters, optimizer and gradients leave the device while the engine generates. First table:
medians over the steps after the first two. Second: the ledger, third step and last. Third, with
CUDA: what was reserved after the engine fell asleep beside the tensors, which the memory plan takes
as a constant. It has not run on a GPU yet.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import string
import subprocess
import sys
from pathlib import Path

import torch
from gpu_model import CPU_OVERRIDES, SHAPE_1B, add_options, show, write_model
from tokenizers import Tokenizer, models
from tokenizers.decoders import Fuse
from transformers import PreTrainedTokenizerFast

from megatron_rl.planning.phases import OVERHEAD_GIB

REPO = Path(__file__).resolve().parents[2]
WARM_STEPS = 2
TIMES = ("step_s", "rollout_s", "logprob_s", "update_s", "sync_s")


def write_tokenizer(model: Path) -> None:
    """One token for each letter; the special tokens are those of the model's configuration."""
    vocab = ["<pad>", "<bos>", "<eos>", *string.ascii_letters]
    core = Tokenizer(
        models.BPE(vocab={token: index for index, token in enumerate(vocab)}, merges=[])
    )
    core.decoder = Fuse()
    core.add_special_tokens(vocab[:3])
    PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    ).save_pretrained(model)


def write_prompts(file: Path, count: int, letters: int) -> Path:
    draw = random.Random(0)
    rows = [
        {
            "prompt": "".join(draw.choices(string.ascii_letters, k=letters)),
            "answer": "a",
            "data_source": "random",
        }
        for _ in range(count)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="ascii")
    return file


def overrides(options: argparse.Namespace, model: Path) -> list[str]:
    """Of a run of GRPO with reference logprobs, without evaluation, checkpoints or export."""
    data = write_prompts(
        options.folder / "prompts.jsonl", 4 * options.prompts, options.prompt_tokens
    )
    longest = options.prompt_tokens + options.response_tokens
    return [
        *(CPU_OVERRIDES if not torch.cuda.is_available() else ()),
        f"model.path={model}",
        f"data.train={data}",
        f"data.eval={data}",
        "data.drop_eval_overlap=false",
        "data.apply_chat_template=false",
        "data.columns.extra=null",
        "reward.verifier=exact",
        "reward.format_weight=1.0",
        "reward.format_pattern='(..)*'",
        f"trainer.num_steps={options.steps}",
        f"batch.prompts_per_step={options.prompts}",
        f"batch.prompts_per_minibatch={options.prompts}",
        "batch.responses_per_prompt=8",
        f"batch.tokens_per_microbatch={max(options.tokens_per_microbatch, longest)}",
        f"rollout.max_prompt_tokens={options.prompt_tokens}",
        f"rollout.max_response_tokens={options.response_tokens}",
        "memory.offload=[optimizer,gradients,weights]",
        "evaluation.every_steps=0",
        "evaluation.at_start=false",
        "evaluation.at_end=false",
        "checkpoint.export_at_end=false",
        "checkpoint.every_steps=0",
        "logging.trackers=[]",
        "logging.log_samples=0",
        "resume=never",
        f"run_dir={options.folder / 'steps'}",
        *options.override,
    ]


def summary(
    metrics: list[dict[str, float]], options: argparse.Namespace
) -> list[list[dict[str, object]]]:
    """The two tables, of the rows of metrics.jsonl."""
    kept = [row for row in metrics if row["step"] > WARM_STEPS]

    def median(key: str) -> float:
        return sorted(row[key] for row in kept)[len(kept) // 2]

    first: dict[str, object] = {"run": " ".join(options.override) or "defaults", "steps": len(kept)}
    first |= {name: median(f"time/{name}") for name in TIMES}
    first |= {"response tokens/s": median("throughput/response_tokens_per_s")}
    first |= {
        f"mismatch {name}": median(f"mismatch/logprob_abs_diff_{name}") for name in ("mean", "max")
    }
    phases = [key for key in kept[-1] if key.startswith("memory/")]
    ledger = [
        {
            "memory of": key.removeprefix("memory/").removesuffix("_gib"),
            f"step {WARM_STEPS + 1}, GiB": kept[0][key],
            "last step, GiB": kept[-1][key],
        }
        for key in phases
    ]
    return [[first], ledger, *beside_tensors(kept[-1])]


def beside_tensors(row: dict[str, float]) -> list[list[dict[str, object]]]:
    """One table of what the device held beside torch's tensors and the engine's when the engine had
    fallen asleep, and what the memory plan takes for it; none without a device."""
    held = {what: row.get(f"memory/sleep_{what}_gib") for what in ("used", "allocated", "engine")}
    if None in held.values():
        return []
    return [
        [
            {
                "beside tensors, GiB": held["used"] - held["allocated"] - held["engine"],
                "planned, GiB": OVERHEAD_GIB["cuda"],
            }
        ]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Whole steps of reinforcement learning on this machine."
    )
    add_options(parser, SHAPE_1B)
    sizes = dict(steps=12, nproc=1, prompts=32, prompt_tokens=128, response_tokens=1024)
    for name, value in (sizes | {"tokens_per_microbatch": 16384}).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    options = parser.parse_args()
    if options.steps <= WARM_STEPS:
        sys.exit(
            f"error: --steps {options.steps}: the first {WARM_STEPS} steps are not counted; give"
            f" {WARM_STEPS + 1} or more"
        )
    model = write_model(options)
    write_tokenizer(model)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={options.nproc}", "-m", "megatron_rl.train"]
    search = os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH")]))
    metrics = options.folder / "steps" / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    subprocess.run(
        [*command, *overrides(options, model)], check=True, env={**os.environ, "PYTHONPATH": search}
    )
    show(
        summary(
            [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()], options
        ),
        options,
    )


if __name__ == "__main__":
    main()
