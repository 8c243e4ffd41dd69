"""Tool calls as other models write them: vLLM's parsers, on the texts of turns."""

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


class CallFormat:
    """Says a turn again with its calls as ``environments.tools`` reads them."""

    def __init__(
        self, name: str, tokenizer: PreTrainedTokenizerBase, schemas: Sequence[Mapping[str, Any]]
    ) -> None:
        """``name``: as in vLLM's ``--tool-call-parser``; ``schemas``: of the tools, by which it
        tells numbers from texts. Raises ValueError where vLLM has no such parser, or it does not
        go with the tokenizer."""
        # Here: vLLM takes seconds, and its servers may be elsewhere.
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tool_parsers import ToolParserManager

        asked = {"messages": [{"role": "user", "content": ""}], "tools": list(schemas)}
        self._request = ChatCompletionRequest(**asked)
        self._tokenizer: Any = tokenizer
        try:
            self._parser = ToolParserManager.get_tool_parser(name)
            self._parser(self._tokenizer, self._request.tools)
        except KeyError as error:
            there = ", ".join(sorted(ToolParserManager.list_registered()))
            raise ValueError(
                f"env.tool_parser = {name}: vLLM has {there}; choose one of these, or null"
            ) from error
        except Exception as error:
            raise ValueError(
                f"env.tool_parser = {name}: does not go with the tokenizer of the model"
                f" ({error}); choose the parser that vLLM names for it, or null"
            ) from error

    def __call__(self, text: str) -> str | None:
        """``text``: with its control tokens. None: it has no call.

        Example: of ``llama3_json``, ``{"name": "add", "parameters": {"a": 1}}`` becomes
        ``<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>``.
        """
        parser = self._parser(self._tokenizer, self._request.tools)  # it keeps what it has read
        try:
            found = parser.extract_tool_calls(text, self._request)
        except Exception as error:  # noqa: BLE001 - of a text that the model has made up
            logger.debug("env.tool_parser: %r", error)
            return None
        if not found.tools_called:
            return None
        calls = [
            {"name": call.function.name, "arguments": _read(call.function.arguments)}
            for call in found.tool_calls
        ]
        said = [f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls]
        return "\n".join([found.content or "", *said]).strip()


def _read(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments  # a text: the model is told that arguments are an object
