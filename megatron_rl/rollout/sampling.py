"""From the project's sampling settings to those of the engine."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_rl.types import Sampling

if TYPE_CHECKING:
    from vllm import SamplingParams

SEED_BITS = 62  # the engine adds the sample index to the seed and keeps the sum in a signed 64-bit integer


def request_seed(seed: int, prompt_uid: str) -> int:
    """Seed of the first response to a prompt; response j uses ``request_seed + j``.

    It depends on the run's seed and on the prompt alone, so that neither the number of replicas nor the order of prompts
    changes a response. A GPU draws other tokens from it than a CPU does.
    """
    digest = hashlib.blake2b(f"{seed}/{prompt_uid}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - SEED_BITS)


def vllm_sampling(sampling: Sampling, seed: int, eos_token_ids: Sequence[int]) -> SamplingParams:
    """One request for ``num_responses`` responses.

    A response ends with one of ``eos_token_ids`` or ``stop_token_ids`` (kept as its last token), with a ``stop`` string (its
    tokens are kept), or at the length limit. Logprobs are those of the sampled token only.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        n=sampling.num_responses,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=seed,
        max_tokens=sampling.max_response_tokens,
        stop=list(sampling.stop),
        stop_token_ids=sorted({*eos_token_ids, *sampling.stop_token_ids}),
        # End tokens are given above: left to itself the engine takes them from the tokenizer too, hence other ones when it has none.
        ignore_eos=True,
        detokenize=bool(sampling.stop),
        logprobs=0,
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def scoring() -> SamplingParams:
    """A request that is there for the logprobs of its prompt; the one token it must generate is thrown away."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
