"""Data contracts of the training step, each with a worked example.

Two layouts recur everywhere. *Responses*: N rows, in a step in canonical (prompt, response) order;
a value per response is the same on every rank. *Response tokens*: the T tokens of all N
responses of a batch, concatenated in its order; every per-token vector (old, sampler and reference
logprobs, entropy, loss mask) has this layout, so a token is named by one integer in [0, T). A rank
holds the tokens of the responses that its data-parallel rank works on, and no others.
"""

import io
import math
import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import PIL.Image
import pyarrow
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from megatron_rl.annealing import Annealing


@dataclass(frozen=True)
class Image:
    """An image file of a prompt, not decoded. Two images are the same when their bytes are.

    ``digest``: sha256 of the file, hex; ``width`` and ``height``: pixels, as its header says.
    Example: ``Image("9f86d0...", width=640, height=480, source=Path("/data/cat.png"))``.
    """

    digest: str
    width: int
    height: int
    source: Path | bytes | pyarrow.Buffer = field(repr=False, compare=False)  # file or content

    def read(self) -> bytes:
        """The file. Raises OSError when it is gone."""
        return self.source.read_bytes() if isinstance(self.source, Path) else bytes(self.source)

    def rgb(self) -> PIL.Image.Image:
        """The pixels, decoded now.

        Raises:
            ValueError: the file is gone or damaged; names it.
        """
        at = self.source if isinstance(self.source, Path) else io.BytesIO(self.source)
        try:
            with PIL.Image.open(at) as opened:
                return opened.convert("RGB")
        except (OSError, SyntaxError) as error:  # Pillow says so of some damaged files
            name = self.source if isinstance(self.source, Path) else f"sha256 {self.digest}"
            raise ValueError(
                f"image {name}: cannot be decoded ({error}); bring the file back, or drop the row"
            ) from error


@dataclass(frozen=True)
class Prompt:
    """One task, tokenized with the chat template.

    Of a prompt with images ``token_ids`` are the expanded ones: the n-th run of image tokens is as
    long as the n-th image has features, see ``data.multimodal.vision``.

    Example: ``Prompt("train:7", token_ids=(1, 17, 12, 5), answer="12", data_source="chain_sum")``.
    """

    uid: str
    token_ids: tuple[int, ...]
    answer: str
    data_source: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""  # as the chat template rendered it; for display only
    images: tuple[Image, ...] = ()  # in the order of their places among the tokens

    @property
    def content(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """What the model is given. Tokens alone do not tell: images of one size have the same."""
        return self.token_ids, tuple(image.digest for image in self.images)


HINTS = "hints"  # key in ``Prompt.extra``: ratio, token_ids and text of its hinted forms
GUIDES = "guides"  # key in ``Prompt.extra``: the demonstrations that a hook gives, as completions


def first_uid(uid: str) -> str:
    """The uid without the number that ``data.loader`` gives a repeat: ``a`` for ``a#2``."""
    return re.sub(r"#\d+$", "", uid)


@dataclass(frozen=True)
class Sampling:
    """How the engine samples.

    Logprobs are those of the distribution sampled from, after temperature and truncation. With a
    seed, response j to a prompt depends on (seed, uid of the prompt, j) only. ``with_kept``: the
    tokens that ``top_k`` and ``top_p`` keep come with each sampled one, so that training can
    restrict the policy to them; ``top_k`` bounds their number. ``num_likely``: how many of the most
    likely tokens come with each sampled one, with their logprobs. ``expert_width``: bytes per token
    of the chosen experts, see ``Completion.experts``; 0: they are not returned.

    Example: ``Sampling(num_responses=8, max_response_tokens=64, temperature=1.0, seed=3)``.
    """

    num_responses: int
    max_response_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    annealing: Annealing | None = None  # in place of ``temperature``, which is then 1
    with_kept: bool = False
    num_likely: int = 0
    expert_width: int = 0

    @property
    def num_kept(self) -> int:
        """Maximum number of kept tokens that come with a sampled one."""
        return self.top_k if self.with_kept else 0


class VersionSpan(NamedTuple):
    """The tokens of a response from the end of the span before up to ``end`` were sampled with
    weights ``version``; ``APPENDED``: an environment appended them, nothing sampled them."""

    version: int
    end: int


APPENDED = -3  # in place of the version of the weights that sampled a token
DEMONSTRATED = -2  # likewise, of a response that was not sampled for its step


def num_appended(spans: Sequence[VersionSpan], behind: int = 0) -> int:
    """Number of tokens after the first ``behind`` that an environment has appended. Example: 1 for
    the spans ``((4, 2), (APPENDED, 3))``."""
    starts = [0, *(span.end for span in spans)]
    return sum(
        max(0, span.end - max(start, behind))
        for span, start in zip(spans, starts, strict=False)
        if span.version == APPENDED
    )


# Fields of ``Completion`` with several slots per token: array type code, value of unused slots.
PLACES = {"kept": ("i", -1), "likely": ("i", -1), "sampler_likely_logprobs": ("f", -math.inf)}


@dataclass(frozen=True)
class Completion:
    """One sampled response. ``token_ids`` ends with the stop token when there is one.

    Any sequence is accepted and stored as an array of 32-bit numbers, so that a token takes 8 bytes
    and no Python object. ``spans``: which weights sampled which tokens, in order, and which tokens
    an environment has appended (those count in no loss, mean or check); default: one span of
    ``weight_version``. ``kept``: the ids that the sampler kept for each token,
    ``Sampling.num_kept`` slots per token, -1 in unused ones; None: the whole vocabulary. ``likely``
    and ``sampler_likely_logprobs``: the ids that were most likely to the sampler, whatever it drew,
    and their logprobs, ``Sampling.num_likely`` slots per token, -1 and -inf in unused ones; None:
    not known. ``experts``: the experts that the engine's routers chose, for all tokens of prompt
    and response, see ``models.experts``; None: not known.

    Example: ``Completion((9, 2), (-0.1, -0.7), truncated=False, weight_version=4)``, whose spans
    are ``(VersionSpan(4, end=2),)``.
    """

    token_ids: Sequence[int]  # array("i")
    sampler_logprobs: Sequence[float]  # array("f")
    truncated: bool  # cut by the length limit, not by a stop condition
    weight_version: int  # of its first token, hence the oldest
    spans: tuple[VersionSpan, ...] = ()
    kept: Sequence[int] | None = None  # array("i")
    likely: Sequence[int] | None = None  # array("i")
    sampler_likely_logprobs: Sequence[float] | None = None  # array("f")
    experts: UInt8[np.ndarray, "all_tokens width"] | None = field(default=None, compare=False)

    @property
    def num_sampled(self) -> int:
        """Number of its tokens, without those that an environment has appended."""
        return len(self.token_ids) - num_appended(self.spans)

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", _packed("i", self.token_ids))
        object.__setattr__(self, "sampler_logprobs", _packed("f", self.sampler_logprobs))
        for name, (typecode, _) in PLACES.items():
            if (values := getattr(self, name)) is not None:
                object.__setattr__(self, name, _packed(typecode, values))
        if not self.spans:
            whole = VersionSpan(self.weight_version, len(self.token_ids))
            object.__setattr__(self, "spans", (whole,))


def _packed(typecode: str, values: Sequence[Any]) -> array:
    """An array of this type; ``values`` itself when it is one."""
    if isinstance(values, array) and values.typecode == typecode:
        return values
    return array(typecode, values)


@dataclass(frozen=True)
class Score:
    """Verdict on one response.

    The total reward, whether the *accuracy* reward is 1, the parts before weighting, and the answer
    that was judged, see ``rewards.base.Verdict``. ``problem``: why there is no verdict; the
    response is then excluded (``reward.on_problem=exclude``). ``environment``: numbers about a
    response with several turns, logged as ``environment/``.
    Example: ``Score(reward=1.5, correct=True, parts={"accuracy": 1.0, "format": 1.0})``.
    """

    reward: float
    correct: bool
    parts: Mapping[str, float] = field(default_factory=dict)
    extracted: str | None = None
    problem: str | None = None
    environment: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Sequences:
    """The lengths of N prompt+response sequences, which every rank knows.

    ``prompt_index``: rows with the same number have the same prompt tokens, so that a forward pass
    may compute them once for neighboring rows; None: not known. Example: two responses to
    one prompt and one to another are ``[0, 0, 1]``.
    """

    prompt_lengths: Int[Tensor, " responses"]
    response_lengths: Int[Tensor, " responses"]
    prompt_index: Int[Tensor, " responses"] | None = None

    @property
    def num_responses(self) -> int:
        return self.response_lengths.numel()

    @property
    def lengths(self) -> Int[Tensor, " responses"]:
        """Whole sequences, in tokens."""
        return self.prompt_lengths + self.response_lengths


@dataclass(frozen=True, kw_only=True)
class SequenceBatch(Sequences):
    """N prompt+response sequences, ragged and flat.

    Example, two sequences "p p r" and "p r r"::

        token_ids = [5, 6, 7, 5, 8, 9]
        prompt_lengths = [2, 1]
        response_lengths = [1, 2]    # T = 3
        response_index = [0, 1, 1]

    ``images``: of each row's prompt, one object for the rows of a prompt; None: no row has any.
    ``temperatures``: of each response token, replacing the policy's; those of prompt tokens are
    then 1. ``kept``: the only ids with a nonzero probability at each response token, see
    ``Completion``; None: the whole vocabulary, as for prompt tokens. ``likely``: ids whose logprobs
    may be asked for at each response token, see ``Completion``. ``experts``: those that the routers
    must take for each token, see ``models.experts``; None: the routers choose.
    """

    token_ids: Int[Tensor, " all_tokens"]
    images: tuple[tuple[Image, ...], ...] | None = None
    temperatures: Float[Tensor, " tokens"] | None = None
    kept: Int[Tensor, "tokens num_kept"] | None = None
    likely: Int[Tensor, "tokens num_likely"] | None = None
    experts: UInt8[Tensor, "all_tokens width"] | None = None

    @property
    def offsets(self) -> Int[Tensor, " responses_plus_1"]:
        """Sequence i is ``token_ids[offsets[i]:offsets[i + 1]]``."""
        return torch.nn.functional.pad(self.lengths.cumsum(0), (1, 0))

    @property
    def response_offsets(self) -> Int[Tensor, " responses_plus_1"]:
        """Row i is ``[response_offsets[i], response_offsets[i + 1])`` of the token layout."""
        return torch.nn.functional.pad(self.response_lengths.cumsum(0), (1, 0))

    @property
    def response_index(self) -> Int[Tensor, " tokens"]:
        """Row of each response token."""
        return torch.repeat_interleave(torch.arange(self.num_responses), self.response_lengths)


def largest(values: Sequence[float]) -> float:
    """The maximum; NaN where one of them is, which ``max`` alone may pass over.

    Example: ``largest([1.0, nan, 2.0])`` is NaN.
    """
    return math.nan if any(math.isnan(value) for value in values) else max(values)


@dataclass(frozen=True)
class SyncReport:
    """One weight sync, as this rank saw it. ``measured``: further metrics by name, measured since
    the sync before (memory by phase, seconds).

    Example: ``SyncReport(version=3, num_tensors=27, bytes_sent=0, bytes_total=1204224,
    seconds=0.011)``.
    """

    version: int
    num_tensors: int
    bytes_sent: int
    bytes_total: int
    seconds: float
    # Mean |engine - policy| in nats, and of the token where it is largest; None: not compared.
    logprob_check_diff: float | None = None
    logprob_check_diff_max: float | None = None
    measured: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Shard:
    """A hyper-rectangle of a HF-named tensor, and where a local parameter holds it.

    The place is a strided view: element ``start + i`` of the tensor is element
    ``offset + sum(i * stride)`` of the parameter, counted from the parameter's own first element in
    its storage. On the training side it holds the values, on the rollout side it receives them.

    Example, the key rows of one query group in a fused parameter of hidden size 4, two heads of
    dimension 2 before it: ``Shard("model.layers.0.self_attn.k_proj.weight", full=(4, 4),
    start=(2, 0), shape=(2, 4), offset=16, stride=(4, 1),
    key="0:decoder.layers.0.self_attention.linear_qkv.weight", dtype="bfloat16")``.
    """

    name: str
    full: tuple[int, ...]  # shape of the whole HF tensor, padding removed
    start: tuple[int, ...]
    shape: tuple[int, ...]
    offset: int
    stride: tuple[int, ...]
    key: str = ""  # name that its owner gives the local parameter; "" for a place without owner
    dtype: str = ""  # "bfloat16", "float32", ...: the torch dtype of that parameter


@dataclass(frozen=True)
class TransferOptions:
    """How a planned weight sync moves its bytes; both ends use the same.

    Example: ``TransferOptions(bucket_mib=64, rounds_in_flight=2, verify=True, timeout_s=300.0)``.
    """

    bucket_mib: int = 64  # most bytes that a process sends, and receives, in one round
    rounds_in_flight: int = 2  # rounds that may hold buffers at once
    verify: bool = True  # compare checksums of every bucket as sent and as arrived, at every sync
    timeout_s: float = 300.0  # of a connection, and of one command to a server
    cast: bool = False  # the engine's floating type may differ: values are cast, then sent
