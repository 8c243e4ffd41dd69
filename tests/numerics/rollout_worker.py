"""One process: what the engine returns, and what it does to the process around it. Writes seeded
samples for other layouts."""

import json
import os
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_rl.engine.engine import VllmEngine
from megatron_rl.runtime import launch, random_state
from megatron_rl.types import Image
from tests.numerics import rollout_models as small

FOLDER = Path(sys.argv[1])
WORLD = launch.start()
PATH = small.write("qwen3", 0, FOLDER)
MODEL = small.build("qwen3", 0)
VLLM_CACHE = FOLDER / "vllm_cache"
os.environ["VLLM_CACHE_ROOT"] = str(VLLM_CACHE)  # empty, as on a new machine
ENVIRONMENT = dict(os.environ)
random.seed(1), np.random.seed(2), torch.manual_seed(3)
BEFORE = random_state.capture()
THREADS = torch.get_num_threads()
ENGINE = VllmEngine(str(PATH), small.engine_config(), seed=0, launch_id=WORLD.launch_id)
AFTER_BUILD = random_state.capture()
PROMPTS = small.make_prompts(8)


def same_state(one: dict, two: dict) -> bool:
    numpy = all(np.array_equal(a, b) for a, b in zip(one["numpy"], two["numpy"], strict=True))
    return one["python"] == two["python"] and numpy and torch.equal(one["torch"], two["torch"])


def keep_top(share: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """The smallest set of tokens whose probability reaches ``share``; the others to -inf."""

    def change(logits: torch.Tensor) -> torch.Tensor:
        ordered, index = logits.softmax(-1).sort(descending=True)
        dropped = (ordered.cumsum(-1) - ordered) >= share
        return logits.masked_fill(torch.zeros_like(dropped).scatter(-1, index, dropped), -torch.inf)

    return change


def logprobs_are_of_the_sampled_distribution() -> None:
    for temperature in (1.0, 0.7):
        groups = ENGINE.generate(PROMPTS, small.sampling(temperature=temperature))
        assert small.logprob_gap(MODEL, PROMPTS, groups, lambda x, t=temperature: x / t) <= 1e-4
    assert small.logprob_gap(MODEL, PROMPTS, groups, lambda x: x) > 0.1, (
        "the temperature changes them"
    )


def truncation_renormalises() -> None:
    groups = ENGINE.generate(PROMPTS, small.sampling(temperature=0.7, top_p=0.6))
    assert small.logprob_gap(MODEL, PROMPTS, groups, lambda x: keep_top(0.6)(x / 0.7)) <= 1e-4
    assert small.logprob_gap(MODEL, PROMPTS, groups, lambda x: x / 0.7) > 0.3, (
        "they are not those of the whole distribution"
    )


def greedy() -> None:
    groups = ENGINE.generate(PROMPTS, small.sampling(temperature=0.0, num_responses=1, seed=None))
    for prompt, (completion,) in zip(PROMPTS, groups, strict=True):
        assert small.reference_logits(MODEL, prompt, completion).argmax(-1).tolist() == list(
            completion.token_ids
        )
    assert small.logprob_gap(MODEL, PROMPTS, groups, lambda x: x) <= 1e-4


def ends() -> None:
    groups = ENGINE.generate(PROMPTS, small.sampling(num_responses=16, max_response_tokens=64))
    flat = [completion for group in groups for completion in group]
    ended = [completion for completion in flat if small.EOS in completion.token_ids]
    assert 0 < len(ended) < len(flat), "the sample holds both kinds"
    for completion in flat:
        cut = small.EOS not in completion.token_ids
        assert completion.truncated == cut and (len(completion.token_ids) == 64 or not cut)
        assert cut or completion.token_ids.index(small.EOS) == len(completion.token_ids) - 1
        assert len(completion.sampler_logprobs) == len(completion.token_ids)
    stop = flat[0].token_ids[3]
    again = ENGINE.generate(
        PROMPTS[:1], small.sampling(num_responses=1, max_response_tokens=64, stop_token_ids=(stop,))
    )[0][0]
    assert (
        again.token_ids == flat[0].token_ids[: flat[0].token_ids.index(stop) + 1]
        and not again.truncated
    )


def stop_strings() -> None:
    characters = [chr(33 + index) for index in range(small.VOCAB)]
    core = Tokenizer(
        models.WordLevel(
            {character: index for index, character in enumerate(characters)}, unk_token="!"
        )
    )
    core.pre_tokenizer, core.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=characters[5])
    tokenizer.save_pretrained(PATH)
    text = [
        characters[token]
        for token in ENGINE.generate(PROMPTS[:1], small.sampling(num_responses=1))[0][0].token_ids
    ]
    stop = "".join(text[2:4])
    engine = VllmEngine(
        str(PATH), small.engine_config(stop=(stop,)), seed=0, launch_id=WORLD.launch_id
    )
    one = engine.generate(PROMPTS[:1], small.sampling(num_responses=1, stop=(stop,)))[0][0]
    assert [characters[token] for token in one.token_ids] == text[:4] and not one.truncated
    whole = engine.generate(PROMPTS, small.sampling(max_response_tokens=64))
    assert small.tokens(whole) == small.tokens(
        ENGINE.generate(PROMPTS, small.sampling(max_response_tokens=64))
    ), "end tokens are those of the model, whether a tokenizer is loaded or not"


def samples_depend_on_seed_prompt_and_index_only() -> None:
    groups = small.tokens(ENGINE.generate(PROMPTS, small.sampling()))
    assert groups == small.tokens(ENGINE.generate(PROMPTS, small.sampling()))
    part = [PROMPTS[5], PROMPTS[2]]
    assert small.tokens(ENGINE.generate(part, small.sampling())) == [groups[5], groups[2]]
    assert small.tokens(ENGINE.generate(PROMPTS, small.sampling(num_responses=2))) == [
        group[:2] for group in groups
    ]
    other = small.tokens(ENGINE.generate(PROMPTS, small.sampling(seed=12)))
    renamed = small.tokens(ENGINE.generate([replace(PROMPTS[0], uid="other")], small.sampling()))[0]
    distinct = {
        tuple(row) for kind in (groups, other, [renamed]) for group in kind for row in group
    }
    assert len(distinct) == 4 * 8 + 4 * 8 + 4, "all samples differ"


def unseeded_calls_differ() -> None:
    one, two = (small.tokens(ENGINE.generate(PROMPTS, small.sampling(seed=None))) for _ in range(2))
    assert one != two


def global_generators_are_kept() -> None:
    assert same_state(BEFORE, AFTER_BUILD), "building reseeds them"
    before = random_state.capture()
    ENGINE.generate(PROMPTS, small.sampling())
    assert same_state(before, random_state.capture())
    ENGINE._llm.generate([{"prompt_token_ids": [3, 4, 5]}], use_tqdm=False)
    assert not same_state(before, random_state.capture()), "the engine alone consumes them"


def process_is_kept() -> None:
    assert torch.get_num_threads() == THREADS and torch.distributed.is_initialized()
    for name in (
        "LD_PRELOAD",
        "LOCAL_WORLD_SIZE",
    ):  # a process started later would load vLLM's allocator; a launcher, miscount
        assert os.environ.get(name) == ENVIRONMENT.get(name), name
    torch.set_num_threads(THREADS + 2)
    assert torch.get_num_threads() == THREADS + 2, "vLLM turns torch.set_num_threads into nothing"
    torch.set_num_threads(THREADS)
    known = VLLM_CACHE / "modelinfos"
    assert not known.exists(), "vLLM has asked a process of its own what the model's class can do"


def errors() -> None:
    long = small.make_prompts(1, length=301)
    tagged = [replace(PROMPTS[0], images=(Image("digest", 28, 28, b""),))]
    for prompts, wanted, message in (
        (long, small.sampling(), "prompt p0: 301 tokens, rollout.max_prompt_tokens is 300"),
        (
            PROMPTS,
            small.sampling(max_response_tokens=65),
            "65 response tokens wanted, rollout.max_response_tokens is 64",
        ),
        (PROMPTS, small.sampling(stop=("a",)), "rollout.stop"),
        (tagged, small.sampling(), "prompt p0: has 1 images, the engine was built for 0"),
    ):
        try:
            ENGINE.generate(prompts, wanted)
        except ValueError as error:
            assert message in str(error), error
        else:
            raise AssertionError(f"no error: {message}")
    assert ENGINE.generate([], small.sampling()) == []


def a_small_cache_changes_nothing() -> None:
    """Prompts that do not fit one forward together, and responses that outgrow the cache and are
    computed again."""
    prompts = small.make_prompts(45, length=250)
    wanted = small.sampling(num_responses=2, max_response_tokens=64)
    engine = VllmEngine(
        str(PATH),
        small.engine_config(kv_cache_gib=12 * 128 * 1024 / 2**30),
        seed=0,
        launch_id=WORLD.launch_id,
    )
    tight, wide = engine.generate(prompts, wanted), ENGINE.generate(prompts, wanted)
    assert small.tokens(tight) == small.tokens(wide)
    assert small.logprob_gap(MODEL, prompts, tight, lambda x: x) <= 1e-4


def write_samples() -> None:
    groups = ENGINE.generate(PROMPTS, small.sampling())
    (FOLDER / "one.json").write_text(
        json.dumps([small.tokens(groups), small.logprobs(groups).tolist()])
    )


CASES = (
    write_samples,
    logprobs_are_of_the_sampled_distribution,
    truncation_renormalises,
    greedy,
    ends,
    stop_strings,
    a_small_cache_changes_nothing,
    samples_depend_on_seed_prompt_and_index_only,
    unseeded_calls_differ,
    global_generators_are_kept,
    process_is_kept,
    errors,
)

if __name__ == "__main__":
    small.run_cases(CASES)
