"""Which prompts servers fail at, and which servers fail at prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

MOST_SERVERS = 3  # that fail at one prompt
_SHOWN = 5


class PromptFailureError(RuntimeError):
    """Server after server fails at a prompt."""


@dataclass
class Failures:
    """A server that fails at one request may do others: the request goes to another one. A server
    that fails twice without an answer between is given up.

    Where ``MOST_SERVERS`` have failed at requests to one prompt, or broke off while they had one,
    and none has answered any between, the run ends: a prompt that ends every server it is sent to
    would end them all, again and again. Prompts are named by their uid.
    """

    _of_server: Counter[str] = field(default_factory=Counter)  # since its last answer
    _at_prompt: dict[str, set[str]] = field(default_factory=dict)  # servers, since its last answer

    def answered(self, server: str, prompt: str) -> None:
        self._of_server.pop(server, None)
        self._at_prompt.pop(prompt, None)

    def failed(self, server: str, prompt: str, why: str) -> bool:
        """A server that goes on has failed at a request; whether it is to be given up."""
        self._of_server[server] += 1
        self.broke_off(server, [prompt], why)
        return self._of_server[server] > 1

    def broke_off(self, server: str, prompts: Iterable[str], why: str) -> None:
        """A server was lost at work; it had requests to these. Raises PromptFailureError."""
        for prompt in prompts:
            self._at_prompt.setdefault(prompt, set()).add(server)
        worst = [uid for uid, servers in self._at_prompt.items() if len(servers) >= MOST_SERVERS]
        if not worst:
            return
        shown = ", ".join(sorted(worst)[:_SHOWN])
        more = f" and {len(worst) - _SHOWN} more" if len(worst) > _SHOWN else ""
        raise PromptFailureError(
            f"prompt {shown}{more}: {MOST_SERVERS} servers have failed while they had a request to"
            f" it; the last one: {why}. Look into the servers' logs; take a prompt that ends them"
            " out of the data, or start servers that can answer it, and resume"
        )
