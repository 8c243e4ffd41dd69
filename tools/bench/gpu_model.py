"""What the GPU benchmarks share: a random model of any size, its policy, a batch, a clock that
waits for the device."""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NoReturn

import torch
import transformers
from safetensors.torch import save_file

from megatron_rl.config.load import compose, validate
from megatron_rl.config.rules.hardware import machine_problems
from megatron_rl.config.schema import Config
from megatron_rl.data.sequences import sequence_batch
from megatron_rl.errors import ConfigError
from megatron_rl.passes import LossOutput, TokenView
from megatron_rl.policy.hardware import this_machine
from megatron_rl.policy.megatron_policy import MegatronPolicy
from megatron_rl.policy.settings import PolicySettings
from megatron_rl.runtime import launch
from megatron_rl.runtime.device import device
from megatron_rl.types import SequenceBatch

EOS = 2
ROW = "ROW "  # begins the line with what a process has measured
# Without CUDA the programs run all the same, with small sizes, to show that they are sound.
CPU_OVERRIDES = ("precision=fp32", "rollout=vllm_cpu")


SHAPE_8B = dict(layers=32, hidden=4096, ffn=14336, heads=32, kv_heads=8, vocab=128256)
SHAPE_1B = dict(layers=16, hidden=2048, ffn=8192, heads=32, kv_heads=8, vocab=128256)


def add_options(
    parser: argparse.ArgumentParser, shape: dict[str, int], *, has_config: bool = True
) -> None:
    """What all programs take: the shape of the model (``shape``: its default), a folder, a file for
    the results, and, where there is a configuration, overrides of it."""
    for name, value in shape.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--folder", type=Path, required=True, help="where models are written, once")
    parser.add_argument("--json", type=Path, help="also write the rows of all tables there")
    if has_config:
        several = "key=value of the configuration, may be given several times"
        parser.add_argument("--override", action="append", default=[], help=several)


def write_model(options: argparse.Namespace) -> Path:
    """A HF directory with random weights in bfloat16, one safetensors file a layer. An existing one
    of these sizes is used again."""
    names = ("layers", "hidden", "ffn", "heads", "kv_heads", "vocab")
    sizes = [getattr(options, name) for name in names]
    path: Path = options.folder / f"llama_{'_'.join(map(str, sizes))}"
    if (path / "model.safetensors.index.json").is_file():
        return path
    path.mkdir(parents=True, exist_ok=True)
    config = transformers.LlamaConfig(
        num_hidden_layers=options.layers,
        hidden_size=options.hidden,
        intermediate_size=options.ffn,
        num_attention_heads=options.heads,
        num_key_value_heads=options.kv_heads,
        vocab_size=options.vocab,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=EOS,
        pad_token_id=0,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )
    with torch.device("meta"):
        shapes = {
            name: tensor.shape
            for name, tensor in transformers.LlamaForCausalLM(config).named_parameters()
        }
    files: dict[str, dict[str, torch.Tensor]] = {}
    where = torch.Generator(device()).manual_seed(0)
    index = {}
    for name, shape in shapes.items():
        index[name] = f"{name.split('.')[2] if '.layers.' in name else 'outer'}.safetensors"
        scale = 1.0 if "norm" in name else shape[-1] ** -0.5
        values = (
            torch.ones(shape)
            if "norm" in name
            else torch.randn(shape, generator=where, device=device()) * scale
        )
        files.setdefault(index[name], {})[name] = values.to("cpu", torch.bfloat16)
    for file, tensors in files.items():
        save_file(tensors, path / file, metadata={"format": "pt"})
    config.save_pretrained(path)
    (path / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index})
    )
    return path


def read_config(model: Path, *overrides: str) -> Config:
    """The package's own configuration. Raises ConfigError for what this machine has not."""
    overrides = (*CPU_OVERRIDES, *overrides) if not torch.cuda.is_available() else overrides
    config = validate(
        Config,
        compose("config", [f"model.path={model}", "data.train=-", "data.eval=-", *overrides]),
        "the benchmark",
    )
    problems = list(
        machine_problems(config, this_machine(), json.loads((model / "config.json").read_text()))
    )
    if problems:
        raise ConfigError(problems, "the benchmark")
    return config


def build_policy(config: Config, max_tokens: int) -> MegatronPolicy:
    return MegatronPolicy(
        config.model,
        config.parallel,
        config.precision,
        config.optim,
        PolicySettings(
            temperature=1.0,
            keep_reference=False,
            total_optimizer_steps=1000,
            max_sequence_tokens=max_tokens,
            tokens_per_microbatch=max_tokens,
        ),
    )


def random_batch(sequences: int, length: int, vocab: int) -> SequenceBatch:
    """Random tokens, an eighth of every sequence prompt."""
    draw = torch.Generator().manual_seed(1)
    rows = torch.randint(3, vocab, (sequences, length), generator=draw).tolist()
    return sequence_batch([(row[: length // 8], row[length // 8 :]) for row in rows])


def policy_gradient(view: TokenView) -> LossOutput:
    """Any loss with a gradient everywhere."""
    return LossOutput(
        -(view.logprobs * torch.cos(view.index.to(view.logprobs.device).float())).sum() / 1e4, {}
    )


def seconds(action: Callable[[], object], repeat: int, warm: int = 1) -> float:
    """Median wall seconds of ``action``, the device's work included."""
    taken = []
    for attempt in range(warm + repeat):
        begin = time.perf_counter()
        action()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if attempt >= warm:
            taken.append(time.perf_counter() - begin)
    return sorted(taken)[len(taken) // 2]


@contextlib.contextmanager
def host_waits() -> Iterator[Counter[str]]:
    """Counts, in the ``with``, the times that the host waits for the device, by the place in the
    code: ``file:line``. Needs CUDA.

    torch counts copies to pageable memory, numbers that Python asks for, and shapes that depend on
    values; an explicit ``torch.cuda.synchronize()`` is not among them."""
    found: Counter[str] = Counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for warning in caught:
        if "called a synchronizing CUDA operation" in str(warning.message):
            found[place(warning.filename, warning.lineno)] += 1


def place(filename: str, line: int) -> str:
    """The last three parts of the path, and the line.

    Example: ``place("/a/b/megatron/core/optimizer/clip_grads.py", 90)`` is
    ``"core/optimizer/clip_grads.py:90"``.
    """
    return f"{'/'.join(Path(filename).parts[-3:])}:{line}"


def leave_row(row: Mapping[str, object]) -> NoReturn:
    """The last of a process that ``row_of_process`` has started."""
    print(ROW + json.dumps(row), flush=True)
    launch.exit_process(0)


def row_of_process(*one: str) -> dict[str, object]:
    """The row that this program leaves, run again with ``--one``; without one its ``outcome``."""
    command = [sys.executable, *sys.argv, "--one", *one]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    for line in done.stdout.splitlines():
        if line.startswith(ROW):
            return json.loads(line.removeprefix(ROW))
    return {"outcome": f"the process ended with code {done.returncode}"}


def show(tables: list[list[dict[str, object]]], options: argparse.Namespace) -> None:
    """Prints the tables, and writes their rows where ``--json`` says."""
    print("\n\n".join(map(table, tables)), flush=True)
    if options.json:
        options.json.write_text(
            json.dumps([row for rows in tables for row in rows], indent=1), encoding="ascii"
        )


def table(rows: list[dict[str, object]]) -> str:
    """A Markdown table; a key is a column, in order of appearance."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [columns, ["---"] * len(columns)]
    for row in rows:
        cells = [row[column] if column in row else "" for column in columns]
        lines.append([f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
