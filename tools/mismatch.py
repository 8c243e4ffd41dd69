"""Where the gap between sampler and trainer comes from: recorded tokens of a step are scored again,
with one thing changed at a time.

    python tools/mismatch.py BUNDLE
    python tools/mismatch.py RUN --step 7 --responses 32

BUNDLE is RUN/nonfinite/step_NNNNNN, of the first minibatch of a step: a run with
nonfinite.bundle_step=N writes it, and tools/replay_step.py RUN --step N --bundle of a recorded run.
Every scoring is an engine or a policy of its own, in --nproc processes: as many as the run had, or
one. Engines score at temperature 1 over the whole vocabulary, so the policies beside them do too.
tools/docs/pages/mismatch.md says how to read the table.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_rl.config.cli.parser import parser_of
from megatron_rl.config.schema import Config
from megatron_rl.data.multimodal.vision import vision_of
from megatron_rl.data.sequences import sequence_batch
from megatron_rl.data.tokenizer import load_tokenizer, text_of
from megatron_rl.engine import arguments
from megatron_rl.engine.requests import MultimodalConfig
from megatron_rl.reporting.report import table
from megatron_rl.runtime.launch import World, exit_process, reported, start
from megatron_rl.trainer.bundle import CONFIG, WEIGHTS
from megatron_rl.types import SequenceBatch
from tools.replay.read_bundle import Bundle, read_bundle
from tools.replay_step import build_policy, layout

LARGE = 0.1  # nats, as the next
ROUNDING = 1e-5
OLDER = "policy, version "
# Of the parts of the gap; what is in no run (a head in 16 bits) or in no gap (a mask) is not here.
REMEDIES = {
    "older weights": "a smaller source.staleness, or method.mismatch.kind=tis",
    "decoding": "see weight_sync.logprob_check_every; rollout.batch_invariant=true",
    "quantization": "rollout.quantization=null, or method.mismatch.kind=tis",
    "engine in 16 bits": "rollout.dtype=float32, or method.mismatch.kind=tis",
    "implementation": "kernels of engine and policy differ; method.mismatch.kind=tis",
    "policy in 16 bits": "precision=fp32, or method.mismatch.kind=tis",
}


@dataclass(frozen=True)
class Scoring:
    """One way of scoring the tokens.

    Attributes:
        engine: by vLLM; else by the policy.
        rollout, precision: settings that are not the run's.
        weights: a HF directory in place of the bundle's.
        as_trained: at the run's temperature and over the kept tokens, of the policy.
        kept: with the tokens that the sampler kept, where ``as_trained``.
        replayed: of the policy, with the experts that the run replayed.
        head_16: the engine's head in the type of its weights.
        plain_attention: torch's attention by matrix products.
    """

    engine: bool = False
    rollout: Mapping[str, Any] | None = None
    precision: Mapping[str, Any] | None = None
    weights: str | None = None
    as_trained: bool = False
    kept: bool = True
    replayed: bool = True
    head_16: bool = False
    plain_attention: bool = False


@dataclass(frozen=True)
class Difference:
    """``to`` - ``source`` of each token, in nats; NaN where a token does not take part."""

    cause: str
    change: str
    nats: np.ndarray

    def row(self) -> tuple[str, ...]:
        own = self.nats[~np.isnan(self.nats)]
        size = np.abs(own)
        figures = (size.mean(), own.mean(), size.max(), (size > LARGE).mean())
        return self.cause, self.change, *(f"{figure:.3g}" for figure in figures)

    @property
    def mean(self) -> float:
        return float(np.nanmean(np.abs(self.nats)))


def find_bundle(source: Path, step: int | None) -> Path:
    """Raises ValueError where there is none."""
    path = source if step is None else source / "nonfinite" / f"step_{step:06d}"
    if not path.is_dir():
        raise ValueError(
            f"{path}: no such folder; a run with nonfinite.bundle_step={step or 'N'} writes it, or"
            " tools/replay_step.py RUN --step N --bundle of a run whose steps are recorded"
        )
    return path


@dataclass(frozen=True)
class Sample:
    """Some responses of the minibatch: their rows in it, and the sequences."""

    rows: list[int]
    batch: SequenceBatch
    recorded: np.ndarray  # the sampler's logprob of each token
    versions: np.ndarray  # that sampled each token; of a response in parts the oldest


def sample(bundle: Bundle, most: int) -> Sample:
    """At most ``most`` responses, spread evenly."""
    local = bundle.experience.local
    assert local is not None
    batch, every = local.batch, sorted(bundle.rows)
    places = np.linspace(0, len(every) - 1, min(most, len(every))).round().astype(int)
    rows = [every[place] for place in places]
    ids, starts = batch.token_ids.tolist(), (batch.offsets[:-1] + batch.prompt_lengths).tolist()
    ends = batch.offsets.tolist()
    pairs = [(ids[ends[row] : starts[row]], ids[starts[row] : ends[row + 1]]) for row in rows]
    images = [] if batch.images is None else [batch.images[row] for row in rows]
    is_taken = torch.isin(batch.response_index, torch.tensor(rows))
    columns = {
        name: values[is_taken]
        for name in ("temperatures", "kept")
        if (values := getattr(batch, name)) is not None
    }
    if batch.experts is not None:  # of prompts too
        of_rows = batch.experts.split(batch.lengths.tolist())
        columns["experts"] = torch.cat([of_rows[row] for row in rows])
    own = replace(sequence_batch(pairs, images=images), **columns)
    responses = bundle.experience.responses
    versions = responses.weight_versions[rows][own.response_index.numpy()]
    recorded = responses.tokens.columns["sampler_logprobs"][is_taken.numpy()]
    return Sample(rows, own, recorded.astype(np.float64), versions)


def score(bundle: Bundle, scoring: Scoring, most: int, world: World) -> np.ndarray:
    """Collective: the logprob of each response token of the ``sample``."""
    config, batch = bundle.config, sample(bundle, most).batch
    if scoring.weights is not None:
        config = config.with_values(model={"path": scoring.weights})
    if scoring.engine:
        return engine_logprobs(config, scoring, batch, bundle.world_size, world)
    precision = config.precision.model_copy(update=dict(scoring.precision or {}))
    config = config.model_copy(update={"precision": precision})
    policy = build_policy(
        replace(bundle, config=config), layout(config, bundle.world_size, world.size)
    )
    if not scoring.as_trained:
        batch = replace(batch, temperatures=None, kept=None)
    elif not scoring.kept:
        batch = replace(batch, kept=None)
    if not scoring.replayed:
        batch = replace(batch, experts=None)
    with sdpa_kernel(SDPBackend.MATH) if scoring.plain_attention else nullcontext():
        scores = policy.score_alone(batch, temperature=None if scoring.as_trained else 1.0)
    return scores.logprobs.double().numpy()


def engine_logprobs(
    config: Config, scoring: Scoring, batch: SequenceBatch, run_size: int, world: World
) -> np.ndarray:
    from megatron_rl.engine.engine import VllmEngine

    ends = batch.offsets.tolist()
    ids = batch.token_ids.tolist()
    sequences = [ids[first:last] for first, last in pairwise(ends)]
    changes: dict[str, Any] = {"max_prompt_tokens": max(map(len, sequences))}
    changes |= {"max_response_tokens": 1, "top_k": 0, "top_p": 1.0, "sleep_level": 0}
    if world.size != run_size:
        changes |= {"tensor": 1, "pipeline": 1, "expert_parallel": False}
    rollout = config.rollout.model_copy(update=changes | dict(scoring.rollout or {}))
    if scoring.head_16:
        arguments._FLOAT32_HEAD.clear()
    multimodal = None
    if batch.images is not None:
        processor = vision_of(config.model.path, config.data)
        assert processor is not None
        multimodal = MultimodalConfig(processor, max(map(len, batch.images)))
    engine = VllmEngine(
        config.model.path,
        rollout,
        seed=config.seed,
        launch_id=world.launch_id,
        multimodal=multimodal,
    )
    scored = engine.score(sequences, batch.images or ())
    rows = zip(scored, batch.response_lengths.tolist(), strict=True)
    return np.array([value for row, length in rows for value in row[-length:]])


def scorings(bundle: Bundle, older: Mapping[int, Path]) -> dict[str, Scoring]:
    """What is needed for this run's causes, by name."""
    config = bundle.config
    plain = {"quantization": None}
    full = plain | {"dtype": "float32"}
    single = {"params": "float32", "fp8": None}
    needed = {
        "policy as trained": Scoring(as_trained=True),
        "policy": Scoring(),
        "engine": Scoring(engine=True),
    }
    if config.rollout.is_truncated:
        needed["policy, no mask"] = Scoring(as_trained=True, kept=False)
    if config.rollout.router_replay != "none":
        needed["policy, own experts"] = Scoring(as_trained=True, replayed=False)
    if config.rollout.quantization is not None:
        needed["engine, not quantized"] = Scoring(engine=True, rollout=plain)
    if config.rollout.dtype != "float32":
        needed["engine, float32"] = Scoring(engine=True, rollout=full)
        needed["engine, head in 16 bits"] = Scoring(engine=True, rollout=plain, head_16=True)
    if config.precision.params != "float32" or config.precision.fp8 is not None:
        needed["policy, float32"] = Scoring(precision=single)
    needed["policy, plain attention"] = Scoring(plain_attention=True)
    for version, path in older.items():
        needed[f"{OLDER}{version}"] = Scoring(as_trained=True, weights=str(path))
    return needed


def older_weights(bundle: Bundle, source: Path) -> dict[int, Path]:
    """By version: weights that have sampled responses before. Version 0 is the model of the start,
    version n the weights in a bundle of step n + 1 next to this one."""
    paths = {0: Path(json.loads((source / CONFIG).read_text(encoding="utf-8"))["model"]["path"])}
    versions = {*bundle.experience.responses.weight_versions[bundle.rows].tolist()}
    versions -= {bundle.step - 1}
    for version in sorted(versions - {0}):
        paths[version] = source.parent / f"step_{version + 1:06d}" / WEIGHTS
    return {each: path for each, path in paths.items() if each in versions and path.is_dir()}


def differences(bundle: Bundle, taken: Sample, found: Mapping[str, np.ndarray]) -> list[Difference]:
    """``found``: logprobs of the tokens by the name of their scoring."""
    trained, recorded = found["policy as trained"], taken.recorded
    result = [Difference("all", "sampler, recorded -> policy as trained", trained - recorded)]
    for name, logprobs in found.items():
        if name.startswith(OLDER):
            is_own = taken.versions == int(name.removeprefix(OLDER))
            nats = np.where(is_own, trained - logprobs, np.nan)
            result.append(Difference("older weights", f"{name} -> policy as trained", nats))
    is_current = taken.versions == bundle.step - 1
    rollout = bundle.config.rollout
    is_plain = taken.batch.temperatures is None and not rollout.is_truncated
    if is_plain and rollout.temperature == 1 and is_current.any():
        nats = np.where(is_current, found["engine"] - recorded, np.nan)
        result.append(Difference("decoding", "sampler, recorded -> engine", nats))
    # Their sum is the way from the engine to the policy, whichever of them this run has.
    chain = [
        ("engine", ""),
        ("engine, not quantized", "quantization"),
        ("engine, float32", "engine in 16 bits"),
        ("policy, float32", "implementation"),
        ("policy", "policy in 16 bits" if "policy, float32" in found else "implementation"),
    ]
    present = [(name, cause) for name, cause in chain if name in found]
    pairs = [(one, other, cause) for (one, _), (other, cause) in pairwise(present)]
    unquantized = "engine, not quantized" if "engine, not quantized" in found else "engine"
    pairs += [
        ("policy", "policy, plain attention", "attention kernel"),
        (unquantized, "engine, head in 16 bits", "head in 16 bits"),
        ("policy as trained", "policy, no mask", "sampling mask"),
        ("policy as trained", "policy, own experts", "router"),
    ]
    return result + [
        Difference(cause, f"{one} -> {other}", found[other] - found[one])
        for one, other, cause in pairs
        if other in found
    ]


def describe(bundle: Bundle, taken: Sample, found: Sequence[Difference]) -> str:
    heads = ("cause", "change", "mean |d|", "mean d", "max |d|", f"> {LARGE}")
    batch = taken.batch
    tokens = int(batch.response_lengths.sum())
    lines = [
        f"step {bundle.step}: {batch.num_responses} responses, {tokens} tokens; d in nats a token",
        table([heads, *(each.row() for each in found)]),
        f"retokenization: {_retokenized(bundle.config, batch)} of {batch.num_responses} responses"
        " would be other tokens if their text were encoded again; ids are trained on as sampled",
    ]
    scored = [each.change for each in found if each.cause == "older weights"]
    for version in sorted({*taken.versions.tolist()} - {bundle.step - 1}):
        if not any(change.startswith(f"{OLDER}{version} ") for change in scored):
            lines.append(
                f"older weights: version {version} is not there; a bundle of step {version + 1}"
                " next to this one has it"
            )
    if not any(each.cause == "decoding" for each in found):
        lines.append(
            "decoding: not told apart, engines score at temperature 1 without top-k, top-p"
        )
    largest = max((each for each in found if each.cause in REMEDIES), key=lambda each: each.mean)
    remedy = REMEDIES[largest.cause] if largest.mean > ROUNDING else "rounding of float32"
    lines.append(f"largest: {largest.cause}, {largest.mean:.3g}: {remedy}")
    return "\n".join(lines)


def _retokenized(config: Config, batch: SequenceBatch) -> int:
    tokenizer = load_tokenizer(config.model.path)
    decode, special = text_of(tokenizer), set(tokenizer.all_special_ids)
    changed = 0
    ends, lengths = batch.offsets[1:].tolist(), batch.response_lengths.tolist()
    for end, length in zip(ends, lengths, strict=True):
        ids = batch.token_ids[end - length : end].tolist()
        again = tokenizer.encode(decode(ids), add_special_tokens=False)
        changed += again != [token for token in ids if token not in special]
    return changed


def launched(name: str, scoring: Scoring, options: argparse.Namespace, folder: Path) -> np.ndarray:
    """One scoring in processes of its own. Raises RuntimeError with their last lines."""
    out = folder / "logprobs.npy"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={options.nproc}", __file__, str(options.source)]
    command += [f"--responses={options.responses}", "--scoring", json.dumps(asdict(scoring))]
    done = subprocess.run([*command, "--out", out], capture_output=True, text=True)
    if done.returncode != 0:
        last = "\n".join((done.stdout + done.stderr).splitlines()[-12:])
        raise RuntimeError(f"{name}: could not be scored; its last lines:\n{last}")
    return np.load(out)


def compare(options: argparse.Namespace) -> None:
    bundle = read_bundle(options.source)
    if bundle.number != 1:
        raise ValueError(
            f"{options.source}: minibatch {bundle.number} of its step, whose weights have moved"
            " since they sampled; give the first one's"
        )
    taken = sample(bundle, options.responses)
    found = {}
    needed = scorings(bundle, older_weights(bundle, options.source))
    with tempfile.TemporaryDirectory() as folder:
        for name, scoring in needed.items():
            print(f"scoring: {name}", file=sys.stderr, flush=True)
            found[name] = launched(name, scoring, options, Path(folder))
    print(describe(bundle, taken, differences(bundle, taken, found)))


def main() -> None:
    """Ends the process: 0, or 1 on any error."""
    parser = parser_of(__doc__)
    where = "a folder run_dir/nonfinite/step_NNNNNN, or a run_dir"
    parser.add_argument("source", metavar="BUNDLE | RUN", type=Path, help=where)
    parser.add_argument("--step", type=int, help="of RUN")
    parser.add_argument("--responses", type=int, default=64, help="scored, at most")
    parser.add_argument("--nproc", type=int, default=1, help="processes of a scoring")
    for name in ("--scoring", "--out"):  # of the processes that are started
        parser.add_argument(name, help=argparse.SUPPRESS)
    options = parser.parse_args()
    with reported():
        options.source = find_bundle(options.source, options.step)
        if options.scoring is None:
            compare(options)
            return
        world = start()
        scoring = Scoring(**json.loads(options.scoring))
        logprobs = score(read_bundle(options.source), scoring, options.responses, world)
        if world.is_main:
            np.save(options.out, logprobs)
    exit_process(0)


if __name__ == "__main__":
    main()
