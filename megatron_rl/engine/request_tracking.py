"""Responses that an engine is working on: begun, stepped, ended, dropped."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from megatron_rl.engine.requests import MultimodalConfig, behind, check_expansion, request
from megatron_rl.engine.routed_experts import ExpertReader, TokensOf
from megatron_rl.engine.sampling import request_seed, vllm_sampling
from megatron_rl.runtime.guard.activity import ACTIVITY
from megatron_rl.types import Completion, Prompt, Sampling

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.logprobs import FlatLogprobs
    from vllm.outputs import RequestOutput

# Of one call of ``stepped``: long enough for what is done around a call, such as a message to the
# ranks of the replica, to cost little. An answer waits for the others of the call.
STEPS = 8
_MASS_TOLERANCE = 1e-3  # of all kept tokens; each logprob is rounded to float32


class _Open(NamedTuple):
    """A response under way."""

    name: str  # vLLM's
    asked: tuple[int, ...]  # the tokens before its first new one
    what: str  # for messages
    num_likely: int = 0  # see ``Sampling``
    expert_width: int = 0  # see ``Sampling``

    def tokens(self, num_new: int) -> TokensOf:
        return TokensOf(len(self.asked) + num_new, self.expert_width, self.what)


@dataclass
class RequestTracker:
    """The open requests of one vLLM, each for one response, by request id.

    Ranks of a replica make the same calls in the same order: then each of vLLM's schedulers, which
    know nothing of each other, decides alike, and request ids are equal too. ``experts``: None
    where no sampling wants them.
    """

    eos_token_ids: Sequence[int]
    multimodal: MultimodalConfig | None
    experts: ExpertReader | None = None
    _open: dict[int, _Open] = field(default_factory=dict)  # by request id

    def begin(
        self, llm: LLM, prompt: Prompt, sampling: Sampling, responses: Mapping[int, Sequence[int]]
    ) -> list[int]:
        """Queues these responses (number among all to the prompt -> tokens that it has already) and
        returns their request ids. ``sampling`` has a seed."""
        assert sampling.seed is not None
        what = f"prompt {prompt.uid}"
        prepared = request(prompt.token_ids, prompt.images, self.multimodal, what)
        first = request_seed(sampling.seed, prompt.uid)
        requests = []
        params = []
        for number, there in responses.items():
            left = replace(sampling, max_response_tokens=sampling.max_response_tokens - len(there))
            requests.append(behind(prepared, there))
            params.append(vllm_sampling(left, first + number, self.eos_token_ids, len(there)))
        names = llm.enqueue(requests, params, use_tqdm=False)
        # vLLM puts random letters after the number of a request; its outputs have the number alone.
        request_ids = [int(name.partition("-")[0]) for name in names]
        wanted = (sampling.num_likely, sampling.expert_width)
        for request_id, name, there in zip(request_ids, names, responses.values(), strict=True):
            self._open[request_id] = _Open(name, prompt.token_ids + tuple(there), what, *wanted)
        return request_ids

    def stepped(self, llm: LLM, version: int) -> list[tuple[int, Completion]]:
        """Steps ``STEPS`` times, or until nothing is open; returns the responses that have ended.
        After an exception nothing is open."""
        ended: list[tuple[int, Completion]] = []
        try:
            for _ in range(STEPS):
                if not self._open:
                    break
                outputs = llm.llm_engine.step()
                ended += [self._ended(each, version) for each in outputs if each.finished]
        except Exception:
            self.drop(llm, self.request_ids)
            raise
        ACTIVITY.note("generating")
        return ended

    def _ended(self, output: RequestOutput, version: int) -> tuple[int, Completion]:
        request_id = int(output.request_id)
        request = self._open.pop(request_id)
        if self.multimodal is not None:
            check_expansion(request.asked, output.prompt_token_ids, request.what)
        (response,) = output.outputs
        truncated = response.finish_reason == "length"
        token_ids = list(response.token_ids)
        completion = _completion(
            token_ids, response.logprobs, request, truncated=truncated, version=version
        )
        if self.experts is None or not request.expert_width:
            return request_id, completion
        tokens = request.tokens(len(token_ids))
        experts = self.experts.of_ended(request.name, tokens, response.routed_experts)
        return request_id, replace(completion, experts=experts)

    def drop(self, llm: LLM, request_ids: Iterable[int]) -> int:
        """Ends responses without an answer, if they have not ended; returns the tokens they had."""
        names = [
            self._open.pop(request_id).name
            for request_id in request_ids
            if request_id in self._open
        ]
        # One that ended in the step of an error has an answer that was not returned.
        names = [name for name in names if name in llm.llm_engine.output_processor.request_states]
        num_tokens = sum(_length(llm, name) for name in names)
        if names:
            llm.llm_engine.abort_request(names, internal=True)
        return num_tokens

    def pause(self, llm: LLM, request_ids: Sequence[int], version: int) -> list[Completion]:
        """Ends responses that are open; returns what each has got since it was begun."""
        states = llm.llm_engine.output_processor.request_states
        paused = []
        for request_id in request_ids:
            request = self._open[request_id]
            state = states[request.name]
            flat = state.logprobs_processor.logprobs
            token_ids = list(state.detokenizer.output_token_ids)
            completion = _completion(token_ids, flat, request, truncated=False, version=version)
            if self.experts is not None and request.expert_width:
                experts = self.experts.of_open(request.name, request.tokens(len(token_ids)))
                completion = replace(completion, experts=experts)
            paused.append(completion)
        self.drop(llm, request_ids)
        return paused

    def lengths(self, llm: LLM) -> dict[int, int]:
        """Tokens that every open response has got since it was begun."""
        return {number: _length(llm, request.name) for number, request in self._open.items()}

    @property
    def request_ids(self) -> list[int]:
        """Request ids of all open responses."""
        return list(self._open)


def _length(llm: LLM, name: str) -> int:
    return llm.llm_engine.output_processor.request_states[name].detokenizer.num_output_tokens()


def _completion(
    token_ids: list[int], flat: FlatLogprobs, request: _Open, *, truncated: bool, version: int
) -> Completion:
    """``flat``: ids and logprobs in two lists, see ``vllm_sampling``: of each token those of the
    sampled one, and then of the most likely ones, if they are wanted."""
    if len(flat.token_ids) == len(token_ids):
        assert list(flat.token_ids) == token_ids, "one logprob for each sampled token"
        return Completion(token_ids, flat.logprobs, truncated, version)
    # [tokens, 1 + places]
    ids = np.array(flat.token_ids, dtype=np.int32).reshape(len(token_ids), -1)
    logprobs = np.array(flat.logprobs).reshape(ids.shape)
    assert ids[:, 0].tolist() == token_ids, "the first is the sampled token"
    completion = Completion(token_ids, logprobs[:, 0].tolist(), truncated, version)
    return with_places(completion, ids, logprobs, request.num_likely, request.what)


def with_places(
    completion: Completion,
    ids: Int[np.ndarray, "tokens places"],
    logprobs: Float[np.ndarray, "tokens places"],
    num_likely: int,
    what: str,
) -> Completion:
    """``completion`` with its ``num_likely`` most likely tokens; 0: with the kept ones, see
    ``kept_tokens``, as are the arguments."""
    if not num_likely:
        return replace(completion, kept=array("i", kept_tokens(ids, logprobs, what).tobytes()))
    # vLLM's order but for a sampled token, which a server names first.
    order = np.argsort(-logprobs[:, 1:], axis=1, kind="stable")[:, :num_likely] + 1
    values = np.take_along_axis(logprobs, order, 1).astype(np.float32)
    return replace(
        completion,
        likely=array("i", np.take_along_axis(ids, order, 1).tobytes()),
        sampler_likely_logprobs=array("f", values.tobytes()),
    )


def kept_tokens(
    ids: Int[np.ndarray, "tokens places"], logprobs: Float[np.ndarray, "tokens places"], what: str
) -> Int[np.ndarray, "tokens num_kept"]:
    """The tokens that each of a response was drawn from, -1 in free places.

    Args:
        ids: The sampled token, then the most likely ones.
        logprobs: Of these, in nats; -inf of what the sampler has left out.

    Raises:
        RuntimeError: a token was drawn from others than these; names ``what``.
    """
    kept = np.where(np.isfinite(logprobs[:, 1:]), ids[:, 1:], -1)
    mass = np.exp(logprobs[:, 1:]).sum(1)
    is_wrong = ~(kept == ids[:, :1]).any(1) | (abs(mass - 1) > _MASS_TOLERANCE)
    if is_wrong.any():
        place = int(is_wrong.argmax())
        raise RuntimeError(
            f"{what}: token {ids[place, 0]} (number {place} of a response) was not drawn from the"
            f" {(kept[place] >= 0).sum()} tokens that vLLM kept, whose mass is {mass[place]:g};"
            " another logits processor of the engine may change its logits"
        )
    return kept
