"""The section ``env``: what answers a response that has ended a turn."""

from pydantic import PositiveFloat, PositiveInt

from megatron_rl.knobs import Piece


class EnvironmentConfig(Piece):
    name: str
    tools: tuple[str, ...]
    servers: tuple[str, ...]
    corpus: str | None
    agent: str | None
    tool_parser: str | None
    max_turns: PositiveInt
    max_seconds: PositiveFloat | None
    max_message_characters: PositiveInt
    timeout_s: PositiveFloat
    step_timeout_s: PositiveFloat
    num_workers: PositiveInt
    memory_gib: PositiveFloat

    @property
    def has_turns(self) -> bool:
        return self.name != "single"
