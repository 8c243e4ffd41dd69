"""A model and a task so small that a run of the real engines takes seconds: repeat the letter that
was asked for."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import torch
from tokenizers import Tokenizer, models
from tokenizers.decoders import Fuse
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests import warm
from tests.launch import REPO

LETTERS = "abcdefgh"
TIMED = ("time/", "throughput/", "memory/")
VOCAB = ["<pad>", "<eos>", *LETTERS, "?"]
SIZES = dict(
    vocab_size=len(VOCAB),
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=64,
    eos_token_id=1,
    pad_token_id=0,
    bos_token_id=None,
)


# Of memory/PHASE_host_gib, where everything is offloaded.
PHASES = (
    "update",
    "offload",
    "wake_weights",
    "sync",
    "wake_kv_cache",
    "generate",
    "sleep",
    "reload",
)


def write_model(path: Path, seed: int = 0) -> Path:
    """Two layers, random weights."""
    write_tokenizer(path)
    torch.manual_seed(seed)
    Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True)).float().save_pretrained(path)
    return path


def write_experts(path: Path) -> Path:
    """The same with 8 experts in each layer, which are about as likely as each other."""
    write_tokenizer(path)
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        **SIZES,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,  # vLLM's kernel for CPUs pads others
        norm_topk_prob=True,
        tie_word_embeddings=False,
    )
    model = Qwen3MoeForCausalLM(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.02 if name.endswith("mlp.gate.weight") else 0.1)
    model.save_pretrained(path)
    return path


def write_tokenizer(path: Path) -> None:
    """One token a letter."""
    tokenizer = Tokenizer(
        models.BPE(vocab={token: index for index, token in enumerate(VOCAB)}, merges=[])
    )
    tokenizer.decoder = Fuse()
    tokenizer.add_special_tokens(["<pad>", "<eos>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}?"
    fast.save_pretrained(path)


def write_large_config(path: Path) -> Path:
    """The shape of a 72B model, without weights or tokenizer."""
    config = Qwen3Config(
        vocab_size=151936,
        hidden_size=8192,
        intermediate_size=29568,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=False,
        architectures=["Qwen3ForCausalLM"],
    )
    config.save_pretrained(path)
    return path


def write_data(path: Path, *, given: bool = False) -> Path:
    """``given``: each prompt carries its right response."""
    rows = [
        {
            "prompt": letter,
            "answer": letter,
            "data_source": "repeat",
            "extra": {"visual_entropy": 0.1 * index}
            | ({"given_responses": [letter]} if given else {}),
        }
        for index, letter in enumerate(LETTERS)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def overrides(folder: Path, run_dir: Path, *more: str) -> list[str]:
    """Eight prompts x sixteen responses of two tokens; the first letter of a response counts."""
    return [
        "parallel=tp2",
        "precision=fp32",
        "rollout=vllm_cpu",
        "rollout.tensor=2",
        f"model.path={folder / 'model'}",
        "model.make_vocab_divisible_by=4",
        f"data.train={folder / 'data.jsonl'}",
        f"data.eval={folder / 'data.jsonl'}",
        "data.drop_eval_overlap=false",
        "reward.verifier=exact",
        "reward.answer_pattern='^(.)'",
        "batch.prompts_per_step=8",
        "batch.responses_per_prompt=16",
        "batch.prompts_per_minibatch=4",
        "batch.tokens_per_microbatch=256",
        "rollout.max_prompt_tokens=8",
        "rollout.max_response_tokens=2",
        "rollout.kv_cache_gib=0.03125",
        "optim.learning_rate=3e-3",
        "evaluation.every_steps=0",
        "logging.trackers=[]",
        "mismatch_limits.abort_above=1e-4",
        f"run_dir={run_dir}",
        *more,
    ]


def rows(run_dir: Path) -> list[dict]:
    """The metrics of a run, a row for each step."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def untimed_rows(run_dir: Path) -> list[dict]:
    """The same but for what no two runs have alike."""
    return [without(row, *TIMED) for row in rows(run_dir)]


def timeless(row: dict) -> dict:
    """A row without that and without evaluations: a run that goes on has another last step."""
    return without(row, *TIMED, "eval/")


def without(row: dict, *prefixes: str) -> dict:
    return {key: value for key, value in row.items() if not key.startswith(prefixes)}


def alone(folder: Path, run_dir: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """One process, for what is refused before engines are built."""
    command = [str(warm.python()), "-m", "megatron_rl.train"]
    command += overrides(folder, run_dir, "parallel=single", "rollout.tensor=1", *more)
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    return subprocess.run(
        command, capture_output=True, text=True, cwd=REPO, env=environment, timeout=120, check=False
    )


def refused(done: subprocess.CompletedProcess[str]) -> str:
    """The message of a run that was refused before any engine was built."""
    assert done.returncode == 1, done.stderr
    assert "policy: layers of" not in done.stderr and "Traceback" not in done.stderr, done.stderr
    message = done.stderr[done.stderr.index("error: ") :]
    assert len(message.splitlines()) <= 15
    return message
