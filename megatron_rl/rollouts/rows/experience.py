"""What a step learns from: the responses of one rollout, and what the learner adds to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from megatron_rl.annealing import Annealing, policy_temperatures
from megatron_rl.data.sequences import sequence_batch
from megatron_rl.data.token_rows import Ranks, RowNumbers, TokenRows
from megatron_rl.loss import Credit
from megatron_rl.passes import EXPERTS, LocalBatch, TokenScores
from megatron_rl.rollouts.demonstrations import DEMONSTRATED
from megatron_rl.types import Completion, Prompt, Score, SequenceBatch, Sequences

Value = TypeVar("Value")


class Passage(NamedTuple):
    """A part of a conversation: sampled by the model, or appended by its environment."""

    is_sampled: bool
    text: str


@dataclass(frozen=True)
class Response:
    """One completion with text and verdict: what a hook or a log is shown, on rank 0."""

    prompt: Prompt
    completion: Completion
    text: str
    score: Score
    passages: Sequence[Passage] = ()  # ``text``, turn by turn


Groups = Sequence[Sequence[Response]]
# Fields of ``Responses`` with one value per row.
ROW_ARRAYS = ("group_ids", "lengths", "truncated", "weight_versions", "holders")


@dataclass(frozen=True)
class Responses:
    """N scored responses in canonical (prompt, response) order.

    All is equal on every rank but ``tokens``, the rows that lie on this rank, by their numbers in
    this order. ``holders`` is the rank that has each row; ranks that work with that one may have a
    copy. Columns: ``token_ids`` (int32) and ``sampler_logprobs`` (float32). ``experts``: of the
    same rows, the column ``experts`` of all tokens of their sequences, as in ``SequenceBatch``;
    None: not known. ``num_appended``: tokens of each row that its environment has appended; None:
    every token was sampled, else there is a column ``sampled`` (bool).

    Example, two responses to one prompt, of 5 and 7 tokens, on rank 3: ``prompts=[p, p]``,
    ``group_ids=[0, 0]``, ``lengths=[5, 7]``, ``holders=[3, 3]``.
    """

    prompts: Sequence[Prompt]
    group_ids: Int[np.ndarray, " rows"]
    lengths: Int[np.ndarray, " rows"]
    truncated: Bool[np.ndarray, " rows"]
    weight_versions: Int[np.ndarray, " rows"]
    scores: Sequence[Score]
    tokens: TokenRows
    holders: Ranks
    experts: TokenRows | None = None
    num_appended: Int[np.ndarray, " rows"] | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_groups(self) -> int:
        return int(self.group_ids[-1]) + 1 if len(self) else 0

    @property
    def is_demonstration(self) -> Bool[np.ndarray, " rows"]:
        """The rows that came with their prompt, see ``rollouts/demonstrations.py``."""
        return self.weight_versions == DEMONSTRATED

    @property
    def num_sampled_tokens(self) -> int:
        """Sampled tokens of all responses that did not come with their prompt."""
        return int(self.sampled_lengths[~self.is_demonstration].sum())

    @property
    def sampled_lengths(self) -> Int[np.ndarray, " rows"]:
        """Tokens of each response, without those that environments have appended."""
        return self.lengths if self.num_appended is None else self.lengths - self.num_appended

    def by_group(self, values: Sequence[Value]) -> list[list[Value]]:
        """``values``: one of each row."""
        groups: list[list[Value]] = [[] for _ in range(self.num_groups)]
        for value, group in zip(values, self.group_ids.tolist(), strict=True):
            groups[group].append(value)
        return groups

    def take(self, rows: RowNumbers) -> Responses:
        """Some rows, in this order, under new numbers; groups are numbered anew too. Rows of one
        group must stay neighbors."""
        rows = np.asarray(rows, dtype=np.int64)
        number_of = np.full(len(self), -1)
        number_of[rows] = np.arange(len(rows))
        # Of each row on this rank the new number; -1 where it is left out.
        here = number_of[self.tokens.rows]
        taken = self.tokens.rows[here >= 0]

        def renumbered(held: TokenRows) -> TokenRows:
            return replace(held.take(taken), rows=number_of[taken])

        # The sum of changes so far numbers groups from 0: the first row is compared with itself.
        changes = np.diff(self.group_ids[rows], prepend=self.group_ids[rows[:1]]) != 0
        arrays = {name: getattr(self, name)[rows] for name in ROW_ARRAYS}
        return Responses(
            prompts=[self.prompts[row] for row in rows],
            scores=[self.scores[row] for row in rows],
            tokens=renumbered(self.tokens),
            experts=None if self.experts is None else renumbered(self.experts),
            num_appended=None if self.num_appended is None else self.num_appended[rows],
            **{**arrays, "group_ids": changes.cumsum()},
        )


@dataclass(frozen=True)
class Experience:
    """One rollout: N responses in canonical (prompt, response) order.

    Values per response are equal on every rank. Tokens lie where ``responses.holders`` says: first
    where they were sampled, from ``Learner.score`` on with their owners (see
    ``trainer/placement.py``). All tensors are on the host: credit and bookkeeping run there, and a
    micro-batch takes what it needs to the device.

    Attributes:
        progress: share of the run's steps up to and including this one.
        num_sampled: tokens of each response that the sampler drew; None: all of them.
        local: what this rank does of a pass over all rows; its rows are those of
            ``responses.tokens``. Filled in by ``Learner.score``, as is all that follows.
        ref: scores of the reference; None: the method needs none.
        old: of the policy before the step; None: see ``on_policy``.
        token_columns: columns that signals give for the tokens of ``local``.
        columns: those that they give for all responses; in an update also its minibatch's.
    """

    responses: Responses
    sequences: Sequences
    group_ids: Int[Tensor, " responses"]
    rewards: Float[Tensor, " responses"]
    correct: Bool[Tensor, " responses"]
    truncated: Bool[Tensor, " responses"]
    discarded_groups: int = 0  # refused by dynamic sampling
    sampling_rounds: int = 1  # prompts that were looked at, in batches of a step, rounded up
    discarded_tokens: int = 0  # sampled ahead of need, or of groups that were refused
    dropped_tokens: int = 0  # of groups that hooks have dropped
    excluded_tokens: int = 0  # of responses without a verdict, and of groups too small without them
    excluded_share: float = 0.0  # of the responses that the step looked at
    hook_metrics: Mapping[str, float] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)  # by phase: rollout, reward
    source_metrics: Mapping[str, float] = field(default_factory=dict)  # ages, servers
    annealing: Annealing | None = None  # by which the tokens were sampled
    progress: float = 0.0
    step: int = 0
    num_sampled: Int[Tensor, " responses"] | None = None
    local: LocalBatch | None = None
    credit: Credit | None = None
    ref: TokenScores | None = None
    old: TokenScores | None = None
    token_columns: Mapping[str, Tensor] = field(default_factory=dict)
    columns: Mapping[str, Tensor] = field(default_factory=dict)

    def with_experts(self, experts: UInt8[Tensor, "all_tokens width"]) -> Experience:
        """With the experts of all tokens of ``local``."""
        assert self.local is not None
        batch = replace(self.local.batch, experts=experts)
        held = TokenRows(
            self.responses.tokens.rows, batch.lengths.numpy(), {EXPERTS: experts.numpy()}
        )
        return replace(
            self,
            responses=replace(self.responses, experts=held),
            local=replace(self.local, batch=batch),
        )

    def at_step(self, step: int, num_steps: int) -> Experience:
        """With ``step`` and ``progress``, of a run of ``num_steps`` steps, for methods to read."""
        return replace(self, step=step, progress=step / num_steps)

    @property
    def loss_tokens(self) -> Int[Tensor, " responses"]:
        """Tokens of each response that losses and their denominators count."""
        return self.sequences.response_lengths if self.num_sampled is None else self.num_sampled

    @property
    def on_policy(self) -> bool:
        """Of a scored experience: its only update takes the old logprobs from its own forward,
        where they are the current ones without gradient (the ratio is 1)."""
        return self.old is None

    @property
    def scored_tokens(self) -> TokenRows:
        """The rows of this rank with further columns: ``old_logprobs`` and ``ref_logprobs``, as far
        as they were scored, and those of signals."""
        tokens = self.responses.tokens
        columns = dict(tokens.columns)
        for name, scores in (("old_logprobs", self.old), ("ref_logprobs", self.ref)):
            if scores is not None:
                columns[name] = scores.logprobs.numpy()
        columns |= {name: values.numpy() for name, values in self.token_columns.items()}
        return replace(tokens, columns=columns)

    def batch_of(
        self, rows: Int[np.ndarray, " rows"], tokens: TokenRows, experts: TokenRows | None
    ) -> SequenceBatch:
        """What a pass over some rows works on. ``tokens`` and ``experts``: of these rows."""
        prompts = [self.responses.prompts[row] for row in rows]
        ids = zip((prompt.token_ids for prompt in prompts), tokens.views("token_ids"), strict=True)
        images = [prompt.images for prompt in prompts]
        more = {
            name: torch.from_numpy(tokens.columns[name])
            for name in ("kept", "likely")
            if name in tokens.columns
        }
        if experts is not None:
            more[EXPERTS] = torch.from_numpy(experts.columns[EXPERTS])
        temperatures = policy_temperatures(self.annealing, self.responses.lengths[rows])
        batch = sequence_batch(list(ids), self.group_ids[rows], images)
        return replace(batch, temperatures=temperatures, **more)


def experience_of(responses: Responses) -> Experience:
    """``responses`` as the learner gets them."""
    is_all_sampled = responses.num_appended is None
    group_ids = torch.from_numpy(responses.group_ids)
    return Experience(
        responses=responses,
        sequences=Sequences(
            torch.tensor([len(prompt.token_ids) for prompt in responses.prompts]),
            torch.from_numpy(responses.lengths),
            group_ids,
        ),
        group_ids=group_ids,
        rewards=torch.tensor([score.reward for score in responses.scores], dtype=torch.float32),
        correct=torch.tensor([score.correct for score in responses.scores]),
        truncated=torch.from_numpy(responses.truncated),
        num_sampled=None if is_all_sampled else torch.from_numpy(responses.sampled_lengths),
    )
