"""A bandit in the roles of ``protocols``: one logit per token of a small vocabulary. Real
arithmetic, no engine; one process."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl.errors import NonFiniteError
from megatron_rl.passes import (
    LocalBatch,
    Outputs,
    TokenLoss,
    TokenScores,
    TokenView,
    UpdateResult,
)
from megatron_rl.policy.batches.packing_plan import PlanRule, plan_microbatches
from megatron_rl.policy.passes.prefix_sharing import plan_shared_prompts
from megatron_rl.protocols import ENGINE_PARTS
from megatron_rl.runtime.digest import file_digest
from megatron_rl.types import (
    Completion,
    Prompt,
    Sampling,
    Score,
    SequenceBatch,
    Sequences,
    SyncReport,
)
from tests.engines import Answering
from tests.unit.data.plain_packing import BY_TOKENS

VOCAB = 4
LENGTH = 3


class BanditBatching:
    """Micro-batches of whole prompts' responses, planned as the real policy does."""

    def __init__(self, tokens_per_microbatch: int) -> None:
        self.tokens_per_microbatch = tokens_per_microbatch

    data_rank = 0
    owners = (0,)

    def plan(self, sequences: Sequences, rows: Sequence[int]) -> list[list[list[int]]]:
        rule = PlanRule(1, self.tokens_per_microbatch, 1, BY_TOKENS)
        if sequences.prompt_index is None:
            return plan_microbatches(sequences.lengths.tolist(), rows, rule)
        return plan_shared_prompts(sequences, rows, rule)

    def give(self, values: Tensor) -> None:
        """This rank works alone."""


class BanditSaving:
    """Written when somebody waits for it, or at the second look."""

    def __init__(
        self, path: Path, write: Callable[[], None], after: Callable[[], None] | None
    ) -> None:
        self.path = path
        self.looks = 0
        self.waits = 0
        self.done = False
        self._write = write
        self._after = after

    def write_fails(self, error: Exception) -> None:
        def fail() -> None:
            raise error

        self._write = fail

    def check(self, gather: Callable[[Any], list[Any]], *, wait: bool = False) -> bool:
        assert gather(3) == [3] and not self.done
        self.looks += 1
        self.waits += wait
        if wait or self.looks > 1:
            self._finish()
        return self.done

    def end(self, within_s: float) -> None:
        assert within_s > 0
        self._finish()

    def _finish(self) -> None:
        self._write()
        if self._after is not None:
            self._after()
        self.done = True


class BanditPolicy:
    gathered_bytes_sent = 0

    def __init__(self, tokens_per_microbatch: int = 4096) -> None:
        self.batching = BanditBatching(tokens_per_microbatch)
        self.passes: list[str] = []
        self.logits = torch.zeros(VOCAB, dtype=torch.float64)
        self.learning_rate = 0.5
        self.microbatch_sizes: list[list[int]] = []
        self.exported: Path | None = None
        self.away: dict[str, Tensor | None] = {}
        self.savings: list[BanditSaving] = []

    def _view(self, batch: SequenceBatch, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Places in the response-token layout of the responses of ``rows``, and their tokens."""
        index: list[Tensor] = []
        tokens: list[Tensor] = []
        for row in rows:
            first, last = batch.response_offsets[row : row + 2].tolist()
            index.append(torch.arange(first, last))
            end = int(batch.offsets[row + 1])
            tokens.append(batch.token_ids[end - (last - first) : end])
        return torch.cat(index), torch.cat(tokens)

    def score(
        self, batch: LocalBatch, outputs: Outputs = (), *, reference: bool = False
    ) -> TokenScores:
        self.passes.append("reference" if reference else "score")
        return self._scores(batch.batch, outputs, reference)

    def score_alone(self, batch: SequenceBatch, *, temperature: float = 1.0) -> TokenScores:
        return self._scores(batch)

    def _scores(
        self, batch: SequenceBatch, outputs: Outputs = (), reference: bool = False
    ) -> TokenScores:
        """Every token is in the nucleus, so its entropy is that of the policy."""
        logits = torch.zeros_like(self.logits) if reference else self.logits
        logprobs = torch.zeros(int(batch.response_lengths.sum()))
        index, tokens = self._view(batch, range(batch.num_responses))
        logprobs[index] = torch.log_softmax(logits, -1)[tokens].float()
        entropies = torch.full_like(logprobs, float(_entropy(logits)))
        return TokenScores(logprobs, {output.name: entropies for output in outputs})

    def update(
        self,
        batch: LocalBatch,
        loss: TokenLoss,
        outputs: Outputs = (),
        *,
        scores: Outputs | None = None,
    ) -> UpdateResult:
        assert not self.away
        self.passes.append("update")
        sequences, microbatches = batch.work
        scored = None if scores is None else self._scores(sequences, scores)
        self.microbatch_sizes.append([len(members) for members in microbatches])
        logits = self.logits.clone().requires_grad_()
        total = 0.0
        metrics: dict[str, float] = {}
        for members in microbatches:
            index, tokens = self._view(sequences, members)
            entropies = _entropy(logits).expand(len(index))
            columns = {each.name: entropies for each in outputs}
            logprobs = torch.log_softmax(logits, -1)[tokens].float()
            output = loss(TokenView(index, logprobs, columns))
            output.loss.backward()
            total += output.loss.item()
            for key, value in output.metrics.items():
                metrics[key] = (
                    max(metrics.get(key, 0.0), float(value))
                    if key.endswith("_max")
                    else metrics.get(key, 0.0) + float(value)
                )
        norm = logits.grad.norm().item()
        skipped = not (math.isfinite(norm) and math.isfinite(total))
        if not skipped:
            self.logits -= self.learning_rate * logits.grad
        return UpdateResult(total, norm, self.learning_rate, skipped, metrics, scored)

    def renew_reference(self) -> None:
        assert not self.away
        self.passes.append("renew")

    def check_weights(self, step: int) -> None:
        if not self.logits.isfinite().all():
            raise NonFiniteError(f"step {step}: weights are not finite")

    def offload(self, parts: Sequence[str]) -> None:
        for part in parts:
            self.away[part] = self.logits if part == "weights" else None
            if part == "weights":
                del self.logits

    def reload(self) -> None:
        if "weights" in self.away:
            self.logits = self.away["weights"]
        self.away = {}

    def gathered_weights(self) -> Iterator[tuple[str, Tensor]]:
        yield "logits", self.logits

    def save(
        self, path: Path, extra: Mapping[str, Any], about: Mapping[str, Any] | None = None
    ) -> None:
        assert not self.away
        path.mkdir(parents=True)
        torch.save({"logits": self.logits, "extra": dict(extra)}, path / "state.pt")
        state = path / "state.pt"
        files = {state.name: {"bytes": state.stat().st_size, "xxh3": file_digest(state)}}
        (path / "manifest.json").write_text(json.dumps({"info": dict(about or {}), "files": files}))

    def start_save(
        self,
        path: Path,
        extra: Mapping[str, Any],
        about: Mapping[str, Any] | None = None,
        after: Callable[[], None] | None = None,
    ) -> BanditSaving:
        state = copy.deepcopy((dict(extra), dict(about or {})))
        frozen = BanditPolicy(0)
        frozen.logits = self.logits.clone()
        assert not self.away
        saving = BanditSaving(path, lambda: frozen.save(path, *state), after)
        self.savings.append(saving)
        return saving

    def load(self, path: Path) -> Mapping[str, Any]:
        state = torch.load(path / "state.pt", weights_only=False)
        self.logits = state["logits"]
        return state["extra"]

    def export(self, path: Path) -> None:
        self.exported = path


def _entropy(logits: Tensor) -> Tensor:
    """Float32, with gradient."""
    logp = torch.log_softmax(logits, -1)
    return -(logp.exp() * logp).sum().float()


class BanditEngine(Answering):
    def __init__(self) -> None:
        super().__init__()
        self.logits = torch.zeros(VOCAB, dtype=torch.float64)
        self.weight_version = -1
        self.asleep: set[str] = set()

    def response(self, prompt: Prompt, sampling: Sampling, number: int) -> Completion:
        assert not self.asleep
        return self._sample(prompt, sampling, number)

    def _sample(self, prompt: Prompt, sampling: Sampling, j: int) -> Completion:
        if sampling.temperature == 0:
            ids = [int(self.logits.argmax())] * LENGTH
        else:
            draw = random.Random(f"{sampling.seed} {prompt.uid} {j}")
            ids = draw.choices(range(VOCAB), self.logits.softmax(-1).tolist(), k=LENGTH)
        logprobs = torch.log_softmax(self.logits, -1)[ids].tolist()
        return Completion(tuple(ids), tuple(logprobs), False, self.weight_version)

    def score(self, sequences: Sequence[Sequence[int]], images=()) -> list[list[float]]:
        assert not any(images)
        assert not self.asleep
        return [
            torch.log_softmax(self.logits, -1)[list(tokens[1:])].tolist() for tokens in sequences
        ]

    def load_weights(
        self, weights: Iterator[tuple[str, Tensor]], version: int, confirm=None
    ) -> None:
        assert "weights" not in self.asleep
        self.logits = dict(weights)["logits"].clone()
        self.weight_version = version

    def sleep(self) -> None:
        self.asleep = set(ENGINE_PARTS)

    def wake(self, parts: Sequence[str] = ENGINE_PARTS) -> None:
        self.asleep -= set(parts)

    def memory_bytes(self) -> int:
        return 0


class BanditSync:
    def __init__(self, policy: BanditPolicy, engine: BanditEngine) -> None:
        self.policy = policy
        self.engine = engine

    def sync(self, version: int) -> SyncReport:
        self.engine.load_weights(self.policy.gathered_weights(), version)
        return SyncReport(version, 1, 0, 8 * VOCAB, 0.0)


class FirstTokenIsAnswer:
    """Correct when the first token is the prompt's answer."""

    def score(
        self, prompts: Sequence[Prompt], responses: Sequence[str], truncated: Sequence[bool]
    ) -> list[Score]:
        correct = [
            response.split()[0] == prompt.answer
            for prompt, response in zip(prompts, responses, strict=True)
        ]
        return [Score(float(value), value, {"accuracy": float(value)}) for value in correct]


def prompts(count: int, answer: str = "2") -> list[Prompt]:
    return [
        Prompt(f"p{i}", (1, 2), answer, "even" if i % 2 == 0 else "odd", text=f"text of p{i}")
        for i in range(count)
    ]
