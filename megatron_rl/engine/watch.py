"""Progress of a generation, as the engine's own loop sees it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron_rl.runtime.activity import ACTIVITY
from megatron_rl.types import Progress


@contextmanager
def watched(llm_engine: Any, progress: Progress | None) -> Iterator[None]:
    """Inside, ``progress`` is called for every request that ``llm_engine`` finishes, and its steps
    count as activity of this process.

    vLLM's own progress bar counts requests and gives rates as text only, so the results of
    ``LLMEngine.step`` are counted on their way.
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
        ACTIVITY.note("generating")
        for request in outputs:
            if request.finished:
                num_done += len(request.outputs)
                num_tokens += sum(len(response.token_ids) for response in request.outputs)
                progress(num_done, num_tokens)
        return outputs

    llm_engine.step = counting_step
    try:
        yield
    finally:
        del llm_engine.step  # the method of the class shows again
