"""What a run left, looked at: each function returns what is wrong, in words; nothing when all is
well."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.trials.verdicts import BUILT, Outcome

# Keys of metrics that time or the machine decide.
TIMED = ("time/", "throughput/", "memory/")


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of ``metrics.jsonl``; none where there is no file."""
    file = run_dir / "metrics.jsonl"
    if not file.is_file():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def timeless(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if not key.startswith(TIMED)}


def trained(run_dir: Path, steps: int) -> list[str]:
    """The run took ``steps`` steps, wrote them all, and exported finite weights."""
    found = []
    seen = [row["step"] for row in metrics(run_dir) if row["step"] > 0]
    if seen != list(range(1, steps + 1)):
        found.append(f"metrics.jsonl holds steps {shown(seen)}, not 1 to {steps}")
    return found + finite_export(run_dir / "export")


def not_trained(run_dir: Path, *, began: bool = False) -> list[str]:
    """A refused start leaves no export and no rows; one that stopped in the middle may have
    rows."""
    found = ["an export was written"] if (run_dir / "export").exists() else []
    return found + (["rows of metrics were written"] if metrics(run_dir) and not began else [])


def finite_export(folder: Path) -> list[str]:
    """A HF directory whose weights are all finite floats."""
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    if not files or not (folder / "config.json").is_file():
        return [f"no whole HF directory in {folder.name}/"]
    count = 0
    for file in files:
        for tensor in load_file(file).values():
            count += (
                int((~tensor.isfinite()).sum()) if tensor.is_floating_point() else tensor.numel()
            )
    return [f"{count} exported weights are not finite numbers"] if count else []


def generates(folder: Path) -> list[str]:
    """``transformers`` loads the export and its logits are finite."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("ab", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        finite = bool(model(ids).logits.isfinite().all())
    return [] if finite else ["logits of the export are not finite"]


def files(run_dir: Path, *names: str) -> list[str]:
    """Each pattern matches something below the folder."""
    return [f"no {name} in the run folder" for name in names if not list(run_dir.glob(name))]


def same_weights(first: Path, second: Path) -> list[str]:
    """Two HF directories hold the same tensors, bit for bit."""
    import torch
    from safetensors.torch import load_file

    def tensors(folder: Path) -> dict[str, Any]:
        return {
            key: value
            for file in sorted(folder.glob("*.safetensors"))
            for key, value in load_file(file).items()
        }

    one, two = tensors(first), tensors(second)
    if one.keys() != two.keys() or not one:
        return [f"tensors differ: {shown(sorted(one.keys() ^ two.keys()))}"]
    different = [name for name in one if not torch.equal(one[name], two[name])]
    return [f"weights differ: {shown(different)}"] if different else []


def same_metrics(first: Path, second: Path) -> list[str]:
    """All rows equal, but for time, throughput and memory."""
    one, two = metrics(first), metrics(second)
    if [row["step"] for row in one] != [row["step"] for row in two]:
        return [f"steps differ: {len(one)} rows and {len(two)} rows"]
    found = []
    for before, after in zip(one, two):
        left, right = timeless(before), timeless(after)
        keys = [key for key in left.keys() | right.keys() if left.get(key) != right.get(key)]
        if keys:
            found.append(f"step {before['step']} differs in {shown(sorted(keys))}")
    return found[:3]


def shown(values: Sequence[Any]) -> str:
    text = ", ".join(str(value) for value in values[:6])
    return text + (f", ... ({len(values)})" if len(values) > 6 else "")


def looked_at(outcome: Outcome, run_dir: Path, steps: int = 1) -> Outcome:
    """A run that ended well must have left what it promises; one that was refused, nothing."""
    if outcome.code == 0:
        return outcome.noting(trained(run_dir, steps))
    if outcome.code is None:
        return outcome
    began = BUILT["policy"].search(outcome.text) is not None
    return outcome.noting(not_trained(run_dir, began=began))
