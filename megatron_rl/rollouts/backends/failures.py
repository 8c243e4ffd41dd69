"""Which prompts servers fail at, and which servers fail at prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

MOST_SERVERS = 3  # that fail at one request
Asked = tuple[str, int]  # what a server is asked: the uid of a prompt, the number of the response
_SHOWN = 5


class PromptFailureError(RuntimeError):
    """Server after server fails at a prompt."""


@dataclass
class RequestFailures:
    """A server that fails at one request may do others: the request goes to another one. A server
    that fails twice without an answer between is marked dead.

    Where ``MOST_SERVERS``, one after the other, have failed at one request or broke off while they
    had it, the run ends: a prompt that ends every server it is sent to would end them all, again
    and again. Counted by request: a machine that fails takes several servers along, which had
    responses to one prompt.
    """

    _of_server: Counter[str] = field(default_factory=Counter)  # since its last answer
    _at_request: dict[Asked, set[str]] = field(default_factory=dict)  # servers

    def answered(self, server: str, asked: Asked) -> None:
        self._of_server.pop(server, None)
        self._at_request.pop(asked, None)

    def failed(self, server: str, asked: Asked, why: str) -> bool:
        """A server that still runs has failed at a request; whether it is to be marked dead."""
        self._of_server[server] += 1
        self.broke_off(server, [asked], why)
        return self._of_server[server] > 1

    def broke_off(self, server: str, requests: Iterable[Asked], why: str) -> None:
        """A server was lost at work; it had these. Raises PromptFailureError."""
        for asked in requests:
            self._at_request.setdefault(asked, set()).add(server)
        found = self._at_request.items()
        worst = sorted({uid for (uid, _), servers in found if len(servers) >= MOST_SERVERS})
        if not worst:
            return
        shown = ", ".join(worst[:_SHOWN])
        more = f" and {len(worst) - _SHOWN} more" if len(worst) > _SHOWN else ""
        raise PromptFailureError(
            f"prompt {shown}{more}: {MOST_SERVERS} servers, one after the other, have failed while"
            f" they had the same request to it; the last one: {why}. Look"
            " into the servers' logs; take a prompt that ends them out of the data, or start"
            " servers that can answer it, and resume"
        )
