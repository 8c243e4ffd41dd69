"""Demonstrations: responses that come with a prompt, in its ``extra.given_responses``.

They take the first places of the prompt's group, and the engine samples the others. From there on
they are responses like all: rewarded, packed and scored by the policy. The probabilities of their
tokens where they come from are unknown, so their sampler logprobs mean nothing; a response that a
sampling hook remembers keeps the logprobs with which it was sampled.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError
from transformers import PreTrainedTokenizerBase

from megatron_rl.types import DEMONSTRATED, GUIDES, Completion, Prompt

KEY = "given_responses"
Encode = Callable[[str], Sequence[int]]
_Text = Annotated[str, Field(min_length=1)]
_Ids = Annotated[list[Annotated[int, Field(ge=0, strict=True)]], Field(min_length=1)]
_GIVEN = TypeAdapter(Annotated[list[_Text | _Ids], Field(min_length=1)])


def encoder(tokenizer: PreTrainedTokenizerBase) -> Encode:
    """From the text of a response to its tokens, with the end token behind them."""
    plain = partial(tokenizer.encode, add_special_tokens=False)
    return lambda text: [*plain(text), tokenizer.eos_token_id]


def check_demonstrations(
    prompts: Iterable[Prompt], encode: Encode, num_responses: int, max_response_tokens: int
) -> None:
    """Raises ValueError where no prompt carries responses, or one carries invalid, too many or too
    long ones."""
    some = False
    for prompt in prompts:
        given = prompt.extra.get(KEY)
        if given is None:
            continue
        some = True
        try:
            _GIVEN.validate_python(given)
        except ValidationError as error:
            raise ValueError(
                f"prompt {prompt.uid}: extra.{KEY} = {given!r:.80}; give a list of texts, or of"
                " lists of token ids, none of them empty"
            ) from error
        if len(given) > num_responses:
            raise ValueError(
                f"prompt {prompt.uid}: extra.{KEY} has {len(given)} responses, but a group has"
                f" {num_responses} (batch.responses_per_prompt); give at most so many"
            )
        longest = max(len(_token_ids(response, encode)) for response in given)
        if longest > max_response_tokens:
            raise ValueError(
                f"prompt {prompt.uid}: a response of extra.{KEY} has {longest} tokens, and"
                f" rollout.max_response_tokens is {max_response_tokens}; drop it, or raise that"
            )
    if not some:
        raise ValueError(
            f"no prompt has extra.{KEY}, which the method trains on; add them to the data, or"
            " choose another method"
        )


@dataclass(frozen=True)
class Demonstrations:
    """The first responses of a prompt's group, where the prompt brings them along."""

    encode: Encode

    def get(self, prompt: Prompt, response: int) -> Completion | None:
        """Response number ``response``; None: the engine is to sample it. One that a hook
        remembers is a ``Completion`` already."""
        given = prompt.extra.get(KEY) or ()
        if response >= len(given):
            return None
        known = given[response]
        is_completion = isinstance(known, Completion)
        return known if is_completion else demonstration(_token_ids(known, self.encode))


def demonstration(token_ids: Sequence[int]) -> Completion:
    """A response that no engine sampled."""
    return Completion(token_ids, [0.0] * len(token_ids), False, DEMONSTRATED)


def put_aside(prompt: Prompt, encode: Encode) -> Prompt:
    """The prompt with its demonstrations kept for a hook, see ``HookChoice.on_demand``."""
    given = prompt.extra.get(KEY, ())
    guides = [demonstration(_token_ids(response, encode)) for response in given]
    plain = without_demonstrations(prompt)
    return replace(plain, extra={**plain.extra, GUIDES: guides})


def without_demonstrations(prompt: Prompt) -> Prompt:
    """The prompt, to be answered by the engine alone."""
    return replace(prompt, extra={key: value for key, value in prompt.extra.items() if key != KEY})


def given(prompt: Prompt, responses: Sequence[Completion]) -> Prompt:
    """The prompt with these responses in place of those that it brings along."""
    return replace(prompt, extra={**prompt.extra, KEY: list(responses)})


def only(prompt: Prompt, response: int) -> Prompt:
    """The prompt, for one response alone: with the demonstration of that number, if any."""
    known = list(prompt.extra.get(KEY) or ())[response : response + 1]
    return given(prompt, known) if known else without_demonstrations(prompt)


def _token_ids(response: Any, encode: Encode) -> Sequence[int]:
    """The tokens of a text; token ids as they are."""
    return list(encode(response) if isinstance(response, str) else response)
