"""The roles of a training run. Real parts implement them; so do the fakes of unit tests.

All ranks call every method in the same order (single program, many processes); a method that talks
to other ranks says "collective". No implementation may consume the global random state of torch,
numpy or random.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, TypeVar

from jaxtyping import Float
from torch import Tensor

from megatron_rl.passes import LocalBatch, Outputs, TokenLoss, TokenScores, UpdateResult
from megatron_rl.types import (
    Completion,
    Image,
    Prompt,
    Sampling,
    Score,
    Sequences,
    Shard,
    SyncReport,
)

ENGINE_PARTS = ("weights", "kv_cache")
NOTHING: Mapping[int, Sequence[int]] = {}
Experience = TypeVar("Experience", covariant=True)


class RolloutSource(Protocol[Experience]):
    """Where scored responses come from, and where new weights go.

    Who may call what, when. All ranks call all methods, from one thread, in one order::

        [restore]  publish  (generation | training | next training publish)*

    - ``generation`` and ``next`` need the policy's weights published: ``publish`` is called between
      the last update and them. Responses carry the version of the weights that sampled them.
    - The policy is read and changed inside ``training`` only, and there the engines are left alone.
      Between ``training`` and the end of ``publish`` only the source touches it.
    - No two of ``next``, ``training``, ``generation`` and ``publish`` are nested. ``state`` and
      ``restore`` may be called whenever neither ``next`` nor ``publish`` is running.
    - Engines may sample at any other time, also while the policy trains, as long as they do so with
      weights that were published: the policy's own tensors are out of their reach.

    After an exception from any method the policy has all of its state again; an engine whose
    weights are not a published version generates nothing until the next ``publish``.
    """

    def next(self, step: int) -> Experience:
        """Collective. The scored responses that ``step`` trains on: every rank gets the scalars of
        all of them, and one rank holds the tokens of each."""

    def training(self) -> AbstractContextManager[None]:
        """Context in which all of the policy's state is on the device: for passes, updates,
        checkpoints and exports."""

    def generation(self) -> AbstractContextManager[None]:
        """Context in which the engine may be called directly, as evaluation does."""

    def publish(self, version: int) -> SyncReport:
        """Collective. When it returns, the engines hold the policy's weights as ``version``.

        Raises:
            NonFiniteError: the weights are not finite; the engines keep what they have.
            WeightSyncError: on every rank: what the engines hold is not what the policy has.
        """

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: the position in the prompts, equal on all ranks."""

    def restore(self, state: dict[str, Any]) -> None:
        """Continues from ``state``. Raises ValueError when it belongs to other prompts."""


class ImageProcessor(Protocol):
    """Turns images of prompts into the inputs of a vision tower; policy and engine share one. See
    ``data.multimodal.vision.VisionProcessor``."""

    image_token_id: int
    patch_size: int
    merge_size: int
    size_limits: Mapping[str, int]

    def grid(self, image: Image) -> tuple[int, int, int]:
        """Number of patches over time, height and width, from the size in the image's header."""

    def num_tokens(self, image: Image) -> int:
        """Number of image tokens that the image takes in ``Prompt.token_ids``."""

    def pixels(self, image: Image) -> Float[Tensor, "patches values"]:
        """Patches in the order of the tower, float32 on the host, read-only. Hidden patches of a
        ``data.multimodal.masks.MaskedImage`` are black."""

    def keep(self, images: Iterable[Image]) -> None:
        """Called before a pass: keeps the pixels of these images for it and the passes after it."""

    def collapsed(self, token_ids: Sequence[int], images: Sequence[Image]) -> list[int]:
        """``Prompt.token_ids`` with one image token per image. Raises ValueError where the runs of
        image tokens do not match the images."""


class BatchSharding(Protocol):
    """Which rank works on which rows, as the policy's micro-batches decide."""

    @property
    def data_rank(self) -> int: ...

    @property
    def owners(self) -> Sequence[int]:
        """By data-parallel rank: the global rank that receives its rows, and passes them on to the
        other ranks that work on them."""

    def plan(self, sequences: Sequences, rows: Sequence[int]) -> Sequence[Sequence[Sequence[int]]]:
        """data-parallel rank -> micro-batch -> some of ``rows``, each of which occurs once. Every
        rank computes the same plan, without communication."""

    def give(self, values: Tensor) -> None:
        """Collective over the ranks that work on the rows of one data-parallel rank: overwrites
        ``values`` (on the host) with those of their owner."""


class Saving(Protocol):
    """A checkpoint that threads are writing."""

    path: Path

    def check(self, gather: Callable[[Any], list[Any]], *, wait: bool = False) -> bool:
        """Collective: whether the checkpoint is complete; ``wait``: blocks until it is. ``gather``
        returns the values of all ranks. Raises on every rank the error that kept one of them from
        writing, ValueError where its disk is full."""

    def end(self, within_s: float) -> None:
        """Not collective; after an error. Waits at most ``within_s`` for this process's threads."""


class Policy(Protocol):
    """The trained model and its frozen reference.

    How it processes a batch (temperature, prompts computed once) is fixed when it is built. Every
    data-parallel rank has a batch of its own, planned by the policy's ``BatchSharding``; all of
    them have equally many micro-batches.
    """

    def score(
        self, batch: LocalBatch, outputs: Outputs = (), *, reference: bool = False
    ) -> TokenScores:
        """Collective, no gradient: logprobs and ``outputs`` of all response tokens of the batch, by
        one forward."""

    def update(
        self,
        batch: LocalBatch,
        loss: TokenLoss,
        outputs: Outputs = (),
        *,
        scores: Outputs | None = None,
    ) -> UpdateResult:
        """Collective: forward and backward of all batches, one optimizer step and one step of the
        learning-rate schedule. ``outputs``: what the loss gets. ``scores``: outputs to return as
        ``score`` would have returned them before the step; None: no scores are returned."""

    def save(
        self, path: Path, extra: Mapping[str, Any], about: Mapping[str, Any] | None = None
    ) -> None:
        """Collective: weights, reference weights when kept, optimizer, schedule and ``extra``
        (tensors, plain values and containers of them; equal on all ranks). ``about`` (JSON) becomes
        part of the manifest's info, which can be read without loading the checkpoint."""

    def start_save(
        self,
        path: Path,
        extra: Mapping[str, Any],
        about: Mapping[str, Any] | None = None,
        after: Callable[[], None] | None = None,
    ) -> Saving:
        """Collective: as ``save``, but returns as soon as the state is copied; threads write it.
        One at a time. A thread of rank 0 calls ``after`` when the checkpoint is complete."""

    def load(self, path: Path) -> Mapping[str, Any]:
        """Collective: the inverse of save; returns ``extra``."""

    def export(self, path: Path) -> None:
        """Collective: a HF directory (config, safetensors, tokenizer files)."""


class Teacher(Protocol):
    """A frozen model that the policy learns from."""

    def teaches(self, source: str) -> bool:
        """Whether it is asked about responses to prompts of this ``data_source``."""

    def score(self, batch: LocalBatch, outputs: Outputs = ()) -> TokenScores:
        """Collective: as ``Policy.score``, of this model."""


class CheckedWeights(Protocol):
    """What a source asks of the policy before it publishes its weights."""

    def check_weights(self, step: int) -> None:
        """Collective: raises NonFiniteError on every rank when weights, as they are after ``step``,
        hold NaN or infinity."""


class Offloadable(Protocol):
    """What can leave the device memory for a while."""

    def offload(self, parts: Sequence[str]) -> None:
        """Moves parts of this rank's state ("weights", "gradients", "optimizer") out of device
        memory. Gradients are dropped. Until ``reload``, what needs an absent part raises
        RuntimeError."""

    def reload(self) -> None:
        """Brings every part back, bit for bit. Does nothing when all are there."""


class WholeWeightSource(Protocol):
    """Weights as whole HF tensors, one at a time."""

    # Bytes that this rank has sent to others in ``gathered_weights``, since it was built.
    gathered_bytes_sent: int

    def gathered_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Collective: (HF name, whole tensor) on every rank, in a fixed order, without padding."""


class WholeWeightSink(Protocol):
    """Takes whole HF tensors and cuts out the parts that it needs."""

    def load_weights(
        self,
        weights: Iterator[tuple[str, Tensor]],
        version: int,
        confirm: Callable[[], None] | None = None,
    ) -> None:
        """Replaces all weights by HF-named whole tensors; drops caches computed with the old ones.
        ``confirm`` is called before the weights count as ``version``. After an exception in the
        middle, also from ``confirm``, the engine is unusable: later calls raise RuntimeError."""


class WeightSource(Protocol):
    """The training side of one process in a weight sync: shards of HF tensors."""

    def weight_shards(self) -> Sequence[Shard]:
        """What this process holds."""

    def wait_for_param_gather(self) -> None:
        """Collective over the training side: finishes what still changes the weights. Called once
        before each sync."""

    def weight(self, key: str) -> Tensor:
        """The local parameter that the shards call ``key``, as it is now."""


Parameters = Callable[[str], Tensor]  # the local parameter of a key, at the moment of use
Transfer = Callable[[Parameters, Callable[[str], None]], None]


class WeightSink(Protocol):
    """The rollout side of one process in a weight sync: shards of HF tensors."""

    replica: int

    def weight_shards(self) -> Sequence[Shard]:
        """What this process needs; together the processes of one replica need every element of
        every tensor."""

    def update_weights(self, transfer: Transfer, version: int) -> None:
        """Collective. Opens the parameters for writing, calls ``transfer(parameter, written)``
        once, finishes the update, drops caches computed with the old weights and stamps
        ``version``.

        ``parameter(key)`` gives the tensor that a shard is to be written to; ``written(key)`` tells
        that its last shard is in place. After any exception from ``transfer`` the engine is
        unusable: later calls raise RuntimeError.
        """


class Generator(Protocol):
    """Generates responses. ``num_replicas`` engines work side by side; ranks of one replica make
    the same calls in the same order. ``capacity``: how many responses are worth giving to a
    replica at a time.

    ``submit`` begins a response and gives it a request id; ``poll``, ``pause`` or ``abort`` ends
    it."""

    replica: int
    num_replicas: int
    capacity: int
    weight_version: int

    def submit(
        self,
        prompt: Prompt,
        responses: Sequence[int],
        sampling: Sampling,
        so_far: Mapping[int, Sequence[int]] = NOTHING,
    ) -> list[int]:
        """Begins the responses to a prompt with these numbers; returns a request id for each.
        Response j is a function of (``sampling``, uid of the prompt, j) and the weights.

        ``so_far``: by number, the tokens that a response already has. It continues after them, and
        they count toward its length limit; its completion holds the new tokens only."""

    def poll(self) -> list[tuple[int, Completion]]:
        """Samples for a moment: long enough to be called in a loop, short enough to be stopped in
        between. Returns request ids and completions of the responses that ended, on every rank of
        the replica."""

    def abort(self, request_ids: Sequence[int]) -> int:
        """Ends responses without a completion; returns how many tokens are thrown away. Ids of
        responses that have ended are ignored."""

    def pause(self, request_ids: Sequence[int]) -> list[Completion]:
        """Ends open responses; returns what each has sampled since it was submitted, as a
        completion that is not truncated."""

    def running_lengths(self) -> dict[int, int]:
        """By request id: how many tokens each open response has sampled since it was submitted."""


class RolloutEngine(Generator, WholeWeightSink, Protocol):
    """The sampler. ``score``, syncs and sleep require that no response is open."""

    def score(
        self, sequences: Sequence[Sequence[int]], images: Sequence[tuple[Image, ...]] = ()
    ) -> list[list[float]]:
        """Logprob at temperature 1, not truncated, of every token but the first of each sequence,
        on every rank of the replica. Does not change what is generated later. ``images``: those of
        each sequence, in the order in which they occur; empty: no sequence has any."""

    def sleep(self) -> None:
        """Free what training needs (a no-op where the build cannot)."""

    def wake(self, parts: Sequence[str] = ENGINE_PARTS) -> None:
        """Undo sleep for some of ENGINE_PARTS; parts that are awake stay so. Weights that were lost
        have version -1, from ``sleep`` to the next load; generation needs both parts."""

    def memory_bytes(self) -> int:
        """Device memory that the engine holds now; 0 where that is not known."""


class Reward(Protocol):
    """Text in, verdict out; deterministic: a verdict does not depend on the other responses of a
    call. Called in a thread of its own, one call after the other, while an engine generates."""

    def score(
        self, prompts: Sequence[Prompt], responses: Sequence[str], truncated: Sequence[bool]
    ) -> list[Score]: ...


class WeightSync(Protocol):
    """Moves the policy's weights into the engine."""

    def sync(self, version: int) -> SyncReport:
        """Collective. Raises WeightSyncError (naming tensors) when what arrived differs from what
        was sent."""
