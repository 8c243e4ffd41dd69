"""The engine's sampling parameters, made from the project's."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl.types import Sampling

if TYPE_CHECKING:
    from vllm import SamplingParams

# The engine adds the sample index to the seed and keeps the sum in a signed 64-bit integer.
SEED_BITS = 62
OF_REQUEST = "megatron_rl"  # the key of ``extra_args``
# More tokens than a response has: JSON has no infinity.
PLAIN_FOREVER = 1e9
NOT_ANNEALED = [1.0, 1.0, 1.0, PLAIN_FOREVER, 0.0]  # 1 at every position
NOT_CUT = [0.0, 1.0, 1.0]  # the whole vocabulary
# A request for the logprobs of its prompt. vLLM must generate a token; it is thrown away.
SCORING = {"temperature": 0.0, "max_tokens": 1, "prompt_logprobs": 0, "detokenize": False}


def eos_token_ids(model_path: Path) -> tuple[int, ...]:
    """End tokens of a HF directory: those of generation_config.json where it names some, else those
    of config.json."""
    for name in ("generation_config.json", "config.json"):
        file = model_path / name
        if not file.is_file():
            continue
        token_ids = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
        if token_ids is not None:
            return tuple(token_ids) if isinstance(token_ids, list) else (token_ids,)
    return ()


def request_seed(seed: int, prompt_uid: str) -> int:
    """Seed of the first response to a prompt; response j uses ``request_seed + j``.

    It depends on the run's seed and on the prompt alone, so that neither the number of replicas nor
    the order of prompts changes a response. A GPU draws other tokens from it than a CPU does.
    """
    digest = hashlib.blake2b(f"{seed}/{prompt_uid}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - SEED_BITS)


def sampling_values(sampling: Sampling, seed: int, eos_token_ids: Sequence[int]) -> dict[str, Any]:
    """The request for one response, which ``seed`` belongs to, as plain data: the same for vLLM in
    this process and for a vLLM server.

    It ends with one of ``eos_token_ids`` or ``stop_token_ids`` (kept as its last token),
    with a ``stop`` string (its tokens are kept), or at the length limit. Logprobs are those of the
    sampled token, and ``with_kept`` of the ``num_kept`` most likely ones; where ``num_likely`` are
    wanted, of one more: a server leaves one out for a sampled token that is none of them.
    """
    # Where the kept tokens are wanted, ``engine.logits_processors`` makes them so few.
    cut = {"top_p": 1.0, "top_k": -1} if sampling.with_kept else {}
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        **cut,
        "seed": seed,
        "max_tokens": sampling.max_response_tokens,
        "stop": list(sampling.stop),
        "stop_token_ids": sorted({*eos_token_ids, *sampling.stop_token_ids}),
        # End tokens are given above: left to itself the engine takes them from the tokenizer too,
        # hence other ones when it has none.
        "ignore_eos": True,
        "detokenize": bool(sampling.stop),
        "logprobs": sampling.num_likely + 1 if sampling.num_likely else sampling.num_kept,
    }


def vllm_sampling(
    sampling: Sampling, seed: int, eos_token_ids: Sequence[int], num_there: int = 0
) -> SamplingParams:
    """``sampling_values`` for the engine in this process. ``num_there``: tokens of the response
    that the prompt ends with."""
    values = sampling_values(sampling, seed, eos_token_ids)
    return answered_once(**values, extra_args=extra_args(sampling, num_there), flat_logprobs=True)


def extra_args(sampling: Sampling, num_there: int) -> dict[str, Any] | None:
    """What ``engine.logits_processors`` reads of a request, as a flat list; None where there is
    nothing to change.

    Of an annealed temperature start, end, decay_tokens, plain_tokens, and the position at which the
    request begins; then top_k, top_p, and the temperature of the request.
    """
    annealing = sampling.annealing
    if annealing is None and not sampling.with_kept:
        return None
    annealed, cut = NOT_ANNEALED, NOT_CUT
    if annealing is not None:
        numbers = (annealing.start, annealing.end, annealing.decay_tokens, annealing.plain_tokens)
        annealed = [*map(float, numbers), float(num_there)]
    if sampling.with_kept:
        cut = [float(sampling.top_k), sampling.top_p, sampling.temperature]
    return {OF_REQUEST: [*annealed, *cut]}


def answered_once(**values: Any) -> SamplingParams:
    """Of a request to the engine in this process, which answers when all is done."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(**values, output_kind=RequestOutputKind.FINAL_ONLY)
