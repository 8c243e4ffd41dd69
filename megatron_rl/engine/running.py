"""Responses that an engine is working on: begun, stepped, ended, dropped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from megatron_rl.engine.requests import Sight, check_expansion, request
from megatron_rl.engine.sampling import request_seed, vllm_sampling
from megatron_rl.runtime.activity import ACTIVITY
from megatron_rl.types import Completion, Prompt, Sampling

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.outputs import CompletionOutput, RequestOutput

# Of one call of ``stepped``: long enough for what is done around a call, such as a message to the
# ranks of the replica, to cost little beside it. An answer waits for the others of the call.
STEPS = 8


class Running:
    """The open requests of one vLLM, each for one response, by ticket.

    Ranks of a replica make the same calls in the same order: then each of vLLM's schedulers, which
    know nothing of each other, decides alike, and tickets are equal too.
    """

    def __init__(self, eos_token_ids: Sequence[int], sight: Sight | None) -> None:
        self._eos_token_ids = eos_token_ids
        self._sight = sight
        self._open: dict[int, tuple[str, Prompt]] = {}  # ticket -> vLLM's name, prompt

    def begin(
        self, llm: LLM, prompt: Prompt, responses: Sequence[int], sampling: Sampling, seed: int
    ) -> list[int]:
        """Queues these responses (numbers among all to the prompt) and returns their tickets."""
        what = f"prompt {prompt.uid}"
        prepared = request(prompt.token_ids, prompt.images, self._sight, what)
        first = request_seed(seed, prompt.uid)
        params = [
            vllm_sampling(sampling, first + response, self._eos_token_ids) for response in responses
        ]
        names = llm.enqueue([prepared] * len(params), params, use_tqdm=False)
        # vLLM numbers requests, and puts random letters behind the number; its outputs have the
        # number alone.
        tickets = [int(name.partition("-")[0]) for name in names]
        self._open.update(
            {ticket: (name, prompt) for ticket, name in zip(tickets, names, strict=True)}
        )
        return tickets

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
            self.drop(llm, self.tickets)
            raise
        ACTIVITY.note("generating")
        return ended

    def _ended(self, output: RequestOutput, version: int) -> tuple[int, Completion]:
        ticket = int(output.request_id)
        _, prompt = self._open.pop(ticket)
        if self._sight is not None:
            check_expansion(prompt.token_ids, output, f"prompt {prompt.uid}")
        (response,) = output.outputs
        return ticket, _completion(response, version)

    def drop(self, llm: LLM, tickets: Iterable[int]) -> int:
        """Ends responses without an answer; returns the tokens that they had. Those that have ended
        already do not matter."""
        names = [self._open.pop(ticket)[0] for ticket in tickets if ticket in self._open]
        # One that ended beside an error has an answer that nobody got.
        names = [name for name in names if name in llm.llm_engine.output_processor.request_states]
        num_tokens = sum(_length(llm, name) for name in names)
        if names:
            llm.llm_engine.abort_request(names, internal=True)
        return num_tokens

    def lengths(self, llm: LLM) -> list[int]:
        """Tokens so far of every response that is open."""
        return [_length(llm, name) for name, _ in self._open.values()]

    @property
    def tickets(self) -> list[int]:
        """Of all that is open."""
        return list(self._open)


def _length(llm: LLM, name: str) -> int:
    return llm.llm_engine.output_processor.request_states[name].detokenizer.num_output_tokens()


def _completion(response: CompletionOutput, version: int) -> Completion:
    token_ids = list(response.token_ids)
    flat = response.logprobs  # ids and logprobs of all tokens in two lists, see vllm_sampling
    assert list(flat.token_ids) == token_ids, "one logprob for each sampled token"
    return Completion(token_ids, flat.logprobs, response.finish_reason == "length", version)
