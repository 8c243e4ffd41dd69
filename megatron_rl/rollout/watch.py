"""How far a generation has come, seen from the engine's own loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron_rl.types import Progress


@contextmanager
def watched(llm_engine: Any, progress: Progress | None) -> Iterator[None]:
    """Inside, ``progress`` is told of every request that ``llm_engine`` (vLLM's LLMEngine) finishes.

    vLLM's own bar counts requests and tells rates as text only, so the results of its ``step`` are
    looked at on their way.
    """
    if progress is None:
        yield
        return
    step = llm_engine.step
    num_done = 0
    num_tokens = 0

    def counting_step() -> Any:
        nonlocal num_done, num_tokens
        outputs = step()
        for output in outputs:
            if output.finished:
                num_done += len(output.outputs)
                num_tokens += sum(len(response.token_ids) for response in output.outputs)
                progress(num_done, num_tokens)
        return outputs

    llm_engine.step = counting_step
    try:
        yield
    finally:
        del llm_engine.step
