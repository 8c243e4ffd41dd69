"""Messages of an environment as tokens, rendered once, behind tokens that stay as sampled.

Nothing that was sampled is ever encoded again. What is appended is what the chat template writes
behind the words of a finished turn: the end of that message, the new messages, and the header of
the next answer. That is well defined where the template writes the same whatever stands before,
and writes what stands before as the model has read it; both are tried when a run starts.
"""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from megatron_rl.data.multimodal.vision import has_vision_tower
from megatron_rl.errors import concerning
from megatron_rl.rollouts.environments.base import Message

_MARK = "mark-of-the-answer"
_RESULT = "a result"
_WITH_IMAGE = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "words"}]}


class MessageRendering:
    """The tokens of messages that follow a sampled turn.

    Attributes:
        end_token_id: With which the model ends a message.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, roles: Sequence[str], path: str) -> None:
        """``roles``: of the messages that will be rendered; ``path``: of the model.

        Raises:
            ValueError: there is no template, or what it makes of such a message depends on the
                turns before, or changes them.
        """
        self._tokenizer = tokenizer
        self._where = f"the chat template of model.path = {path}"
        if tokenizer.chat_template is None:
            raise ValueError(f"model.path = {path}: has no chat template; env needs one")
        assert isinstance(tokenizer.eos_token_id, int), "the tokenizer has one end token"
        self.end_token_id = tokenizer.eos_token_id
        self._end = str(tokenizer.convert_ids_to_tokens(self.end_token_id))
        # Text of a result that would be read as the end of its message, or as another one; some
        # tokenizers, such as that of Llama 3, name few of them in all_special_tokens.
        added = tokenizer.added_tokens_decoder.values()
        control = {*tokenizer.all_special_tokens, *(each.content for each in added if each.special)}
        self._control = sorted(token for token in control if token)
        self._image_starts = [[_WITH_IMAGE]] if has_vision_tower(path) else []  # conversations
        self._checked: set[str] = set()
        for role in roles:
            self._check(role)

    def tokens(self, messages: Sequence[Message]) -> list[int]:
        """What is appended to a turn that ended with ``end_token_id``, up to the next answer.

        Raises ValueError, as at the start, for a role that was not named there.
        """
        for role in {one["role"] for one in messages} - self._checked:
            self._check(role)
        plain = [
            {name: self._without_control(text) for name, text in one.items()} for one in messages
        ]
        return self._encoded(self._behind(_starts("user")[0], plain))

    def _without_control(self, text: str) -> str:
        for token in self._control:
            # Broken after its first character, so that no part of it is a control token.
            broken = f"{token[0]} {token[1:]}" if len(token) > 1 else " "
            text = text.replace(token, broken)
        return text

    def _behind(self, start: list[Any], messages: Sequence[Message]) -> str:
        """The text behind the end of an answer in a conversation that begins with ``start``."""
        answer = {"role": "assistant", "content": _MARK}
        whole = self._rendered([*start, answer, *messages])
        read = self._rendered(start)
        # The first mark: a message may hold one as well.
        before, _, behind = whole.partition(_MARK)
        if before != read:
            raise ValueError(
                f"{self._where}: writes earlier turns differently once others follow"
                f" ({before[-40:]!r}, where the model has read {read[-40:]!r}), so a policy would"
                " be trained on other tokens than it has sampled; give the model a template that"
                " keeps them, or set env=single"
            )
        if not behind.startswith(self._end):
            raise ValueError(
                f"{self._where}: does not end an answer with {self._end!r}, the end token of the"
                f" tokenizer, but with {behind[:20]!r}; correct one of them, or set env=single"
            )
        return behind.removeprefix(self._end)

    def _check(self, role: str) -> None:
        self._checked.add(role)
        one = {"role": role, "content": _RESULT, "name": "tool"}
        several = [one] if role == "user" else [one, {**one, "content": "another"}]
        for messages in ([one], several):
            starts = [*_starts(role), *self._image_starts]
            first, *others = (self._behind(start, messages) for start in starts)
            for other in others:
                if first != other or _RESULT not in first:
                    raise ValueError(
                        f"{self._where}: what it writes of a message of the role {role} depends on"
                        f" the turns before it ({first[:40]!r}, {other[:40]!r}), or leaves it out;"
                        " give the model a template that does not, or set env=single"
                    )
            turn = self._rendered(_starts(role)[0]) + _MARK + self._end
            apart = [*self._encoded(turn), *self._encoded(first)]
            if apart != self._encoded(turn + first):
                raise ValueError(
                    f"{self._where}: what follows {self._end!r} has other tokens on its own than"
                    " after it (the tokenizer adds some to each text); give the model another"
                    " tokenizer, or set env=single"
                )

    def _encoded(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _rendered(self, messages: list[Any]) -> str:
        remedy = "give the model one for tools, or set env=single"
        with concerning(f"{self._where}: fails at messages of an environment", remedy):
            render = self._tokenizer.apply_chat_template
            return str(render(messages, add_generation_prompt=True, tokenize=False))


def _starts(role: str) -> tuple[list[Any], ...]:
    """Conversations up to an answer: the shortest, and others with earlier turns."""
    question = {"role": "user", "content": "first words"}
    answer = {"role": "assistant", "content": "an answer"}
    result = {"role": role, "content": "an earlier result", "name": "tool"}
    system = {"role": "system", "content": "some words"}
    return [question], [system, question, answer, question], [question, answer, result]
