"""Peak memory of tools/convert_checkpoint.py on a made-up model of about 2 GB, in every direction.

    python tools/bench/convert.py FOLDER [--layers 22] [--max-file-mb 500] [--repeats 5] \\
        [--record FILE]

FOLDER is filled with the model and its conversions (five times the model's size) and must not
exist. The directions take turns. Peak memory is the high-water mark of the converting process less
that of the same process when it only parses its arguments.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import torch
from machine import Watch, description, in_turns, spread

from megatron_rl.checkpoints.hf import ShardWriter
from megatron_rl.models import read_architecture
from megatron_rl.models.parameter_map import hf_shapes, model_parameters

TOOL = Path(__file__).resolve().parents[1] / "convert_checkpoint.py"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "dtype": "bfloat16",
}


def make_model(path: Path, layers: int, max_file_bytes: int) -> None:
    """A HF directory of that shape in bfloat16."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))
    arch, _ = read_architecture(path)
    writer = ShardWriter(path, max_file_bytes)
    generator = torch.Generator().manual_seed(0)
    for parameter in model_parameters(arch):
        for name, shape in hf_shapes(parameter, arch).items():
            writer.add(name, torch.randn(shape, generator=generator).bfloat16())
    writer.close()


def run(*arguments: str) -> tuple[float, float, str]:
    """(peak MiB, seconds, last line of the output) of the tool."""
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, str(TOOL), *arguments], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status != 0:
        raise SystemExit(f"{TOOL.name} {' '.join(arguments)} failed")
    return usage.ru_maxrss / 1024, time.perf_counter() - started, output.splitlines()[-1]


def run_anew(direction: str, source: str, target: str, *options: str) -> tuple[float, float, str]:
    """``run`` into a target that is not there."""
    shutil.rmtree(target, ignore_errors=True)
    return run(direction, source, target, *options)


def conversions(folder: Path, max_file_mb: int) -> dict[str, tuple[str, ...]]:
    """The arguments of the tool, by direction. A direction reads what an earlier one wrote."""
    source = str(folder / "hf")
    megatron = str(folder / "megatron")
    nemo = str(folder / "nemo")
    limit = ("--max-file-gb", str(max_file_mb / 1000))
    return {
        "to-megatron": ("to-megatron", source, megatron),
        "to-nemo": ("to-nemo", source, nemo),
        "to-hf, from megatron": ("to-hf", megatron, str(folder / "back"), *limit),
        "to-hf, from nemo": ("to-hf", nemo, str(folder / "nemo_back"), *limit),
    }


def measure(folder: Path, max_file_mb: int, repeats: int) -> str:
    """The table of all directions."""
    watch = Watch()
    sizes = [file.stat().st_size / 2**20 for file in (folder / "hf").glob("*.safetensors")]
    idle, _, _ = run("--help")
    rows = []
    commands = conversions(folder, max_file_mb)
    variants = {name: partial(run_anew, *command) for name, command in commands.items()}
    for name, runs in in_turns(variants, repeats, same_order=True).items():
        peak = spread([mib - idle for mib, _, _ in runs])
        seconds = spread([wall_s for _, wall_s, _ in runs])
        share = f"{peak.median / max(sizes):.2f}"
        digest = runs[-1][2].split()[-1]
        rows.append(f"| {name} | {peak.text(0)} | {share} | 1.5 | {seconds.text(1)} | {digest} |")
    head = [
        f"{description()}, torch {torch.__version__}; {watch.load()}.",
        "",
        (
            f"Model of {sum(sizes):.0f} MiB in {len(sizes)} files, the largest {max(sizes):.0f}"
            f" MiB; the idle process takes {idle:.0f} MiB."
        ),
        "",
        f"Medians (quartiles) of {repeats} runs.",
        "",
        "| direction | peak MiB above idle | / largest file | target | wall s | digest |",
        "|---|---|---|---|---|---|",
    ]
    return "\n".join([*head, *rows]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--max-file-mb", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--only-make", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only_make:
        make_model(arguments.folder / "hf", arguments.layers, arguments.max_file_mb * 10**6)
        return
    if arguments.folder.exists():
        parser.error(
            f"{arguments.folder} exists; give a folder that does not, with room for five times the"
            " model"
        )
    # In a process of its own: the high-water mark of a child starts at the size of its parent.
    subprocess.run([sys.executable, __file__, *sys.argv[1:], "--only-make"], check=True)
    text = measure(arguments.folder, arguments.max_file_mb, arguments.repeats)
    print(text)
    if arguments.record:
        arguments.record.write_text(
            f"# Conversion of checkpoints\n\n`python tools/bench/convert.py FOLDER`\n\n{text}",
            encoding="ascii",
        )


if __name__ == "__main__":
    main()
