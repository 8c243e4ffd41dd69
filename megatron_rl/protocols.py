"""The four roles of the trainer. Real parts implement them; so do the fakes of unit tests.

All ranks call every method in the same order (single program, many processes); a method that talks to other ranks says
"collective". No implementation may consume the global random state of torch, numpy or random.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import Tensor

from megatron_rl.types import (
    Completion,
    Progress,
    Prompt,
    Sampling,
    Score,
    SequenceBatch,
    SyncReport,
    TokenLoss,
    TokenScores,
    UpdateResult,
)  # fmt: skip

Entropy = Literal["none", "value", "grad"]
ENGINE_PARTS = ("weights", "kv_cache")


class Policy(Protocol):
    """The trained model and its frozen reference."""

    data_parallel_rank: int
    data_parallel_size: int
    one_format: bool  # update and logprobs compute in the same number format
    shares_prompts: bool  # computes a prompt once for neighbouring rows of a micro-batch with the same ``prompt_ids``
    microbatch_multiple: int  # the number of micro-batches of a step must be a multiple of this (interleaved pipelines)

    def logprobs(
        self,
        batch: SequenceBatch,
        microbatches: Sequence[Sequence[int]],
        *,
        reference: bool = False,
        entropy: bool = False,
        temperature: float | None = None,
    ) -> TokenScores:
        """Collective, no gradient. ``microbatches``: rows of ``batch`` for THIS data-parallel rank; together the ranks name
        every wanted row once. All ranks pass the same number of micro-batches; one may be empty. The result holds the
        rows of all ranks. ``temperature``: divides the logits; None: that of the policy."""

    def update(
        self,
        batch: SequenceBatch,
        microbatches: Sequence[Sequence[int]],
        loss: TokenLoss,
        *,
        entropy: Entropy = "none",
        scores: bool = False,
    ) -> UpdateResult:
        """Collective: forward, backward, one optimizer step and one step of the learning-rate schedule. ``entropy`` "grad": give
        the loss a differentiable ``TokenView.entropy`` (else None). ``scores``: return what ``logprobs`` would have returned before
        the step, with entropies unless ``entropy`` is "none"."""

    gathered_bytes_sent: int  # bytes that this rank has sent to others in ``gathered_weights``, since it was built

    def gathered_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Collective: (HF name, whole tensor) on every rank, in one fixed order, padding removed."""

    def check_weights(self, step: int) -> None:
        """Collective: raises NonFiniteError on every rank when weights, as they are after ``step``, hold NaN or infinity."""

    def offload(self, parts: Sequence[str]) -> None:
        """Move parts of this rank's state ("weights", "gradients", "optimizer") out of device memory. Gradients are dropped. Until
        ``reload``, what needs an absent part raises RuntimeError."""

    def reload(self) -> None:
        """Bring every part back, bit for bit. Does nothing when all are there."""

    def save(self, path: Path, extra: Mapping[str, Any], about: Mapping[str, Any] | None = None) -> None:
        """Collective: weights, reference weights when kept, optimizer, schedule and ``extra`` (tensors, plain values and containers of
        them; equal on all ranks); ``about`` (JSON) can be read without loading: it is part of the manifest's info."""

    def load(self, path: Path) -> Mapping[str, Any]:
        """Collective: the inverse of save; returns ``extra``."""

    def export(self, path: Path) -> None:
        """Collective: a HF directory (config, safetensors, tokenizer files)."""


class RolloutEngine(Protocol):
    """The sampler. ``num_replicas`` engines work side by side; ranks of one replica pass the same requests."""

    replica: int
    num_replicas: int
    weight_version: int

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        progress: Progress | None = None,
    ) -> list[list[Completion]]:
        """``num_responses`` completions for each prompt of this replica, on every rank of the
        replica. ``progress`` is called as they get done, where the engine can tell."""

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Logprob at temperature 1, not truncated, of every token but the first of each sequence, on every rank of the replica. Leaves
        no trace in what is generated later."""

    def load_weights(self, weights: Iterator[tuple[str, Tensor]], version: int, confirm: Callable[[], None] | None = None) -> None:
        """Replace all weights by HF-named whole tensors; drop caches computed with the old ones. ``confirm`` is called before the
        weights count as ``version``. An exception in the middle, also of ``confirm``, leaves the engine unusable and it says so."""

    def sleep(self) -> None:
        """Free what training needs (a no-op where the build cannot)."""

    def wake(self, parts: Sequence[str] = ENGINE_PARTS) -> None:
        """Undo sleep for some of ENGINE_PARTS; parts that are awake stay so. Weights that were lost have version -1 until the next
        load; generation needs both parts."""

    def memory_bytes(self) -> int:
        """Device memory that the engine holds now; 0 where it cannot say."""


class Reward(Protocol):
    """Text in, verdict out; deterministic."""

    def score(self, prompts: Sequence[Prompt], responses: Sequence[str], truncated: Sequence[bool]) -> list[Score]: ...


class WeightSync(Protocol):
    """Moves the policy's weights into the engine."""

    def sync(self, version: int) -> SyncReport:
        """Collective. Raises WeightSyncError (naming tensors) when what arrived differs from what was sent."""
