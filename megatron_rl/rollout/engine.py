"""The sampler: vLLM inside the training processes."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.config.schema import RolloutConfig
from megatron_rl.protocols import ENGINE_PARTS
from megatron_rl.rollout.refusals import building
from megatron_rl.rollout.requirements import require_fixed_segments, require_vllm
from megatron_rl.rollout.sampling import request_seed, scoring, vllm_sampling
from megatron_rl.rollout.shared_memory import private_segments
from megatron_rl.rollout.stream import CheckedStream, expected_tensors
from megatron_rl.rollout.streams import EngineStream
from megatron_rl.rollout.watch import watched
from megatron_rl.rollout.worker import Transfer
from megatron_rl.runtime.random_state import preserved_random_state
from megatron_rl.types import Box, Completion, Progress, Prompt, Sampling

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.outputs import CompletionOutput

logger = logging.getLogger(__name__)

# vLLM sets these for its own workers; inherited by a process started later (a reward verifier) or read by a launcher they harm.
RESTORED_VARIABLES = ("LD_PRELOAD", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "LD_LIBRARY_PATH", "NUMEXPR_MAX_THREADS")

# rollout.quantization -> what vLLM calls it; its own "fp8" is an old name for the same.
VLLM_QUANTIZATION = {"fp8": "fp8_per_tensor"}

# Destroying an engine destroys the default process group with it, under the policy's feet: every engine lives until the process ends.
_ALIVE: list[LLM] = []


class VllmEngine:
    """One rank of a rollout engine; every rank of the world builds one, after torch.distributed and Megatron were initialised.

    Replica r is the ranks ``[r * tensor, (r + 1) * tensor)``; they run in lockstep and must pass the same requests.
    Logprobs are of the distribution sampled from: logits / temperature, then top-k and top-p, renormalised. Greedy sampling
    (temperature 0) has no such distribution: its logprobs are those at temperature 1, not truncated.
    """

    def __init__(self, model_path: str, config: RolloutConfig, *, seed: int, launch_id: str) -> None:
        """``launch_id``: unique to the launch, equal on its ranks. Collective.

        Raises:
            ValueError: the world is not a multiple of ``rollout.tensor``; no checkpoint in ``model_path``; vLLM refuses a setting, or
                is of another version than the one supported.
        """
        assert dist.is_initialized(), "initialise torch.distributed before the engine, or vLLM makes a world of one"
        rank, world = dist.get_rank(), dist.get_world_size()
        if world % config.tensor:
            raise ValueError(f"rollout.tensor: {world} processes do not divide into groups of {config.tensor}; choose a divisor of {world}")
        self.replica, self.num_replicas = rank // config.tensor, world // config.tensor
        self.weight_version = 0
        self._config, self._seed, self._num_unseeded = config, seed, 0
        self._failure: str | None = None
        self._expected = expected_tensors(Path(model_path))
        self._eos_token_ids = eos_token_ids(Path(model_path))
        self._asleep: set[str] = set()
        self._boxes: list[Box] | None = None
        self._can_sleep = torch.cuda.is_available() and config.sleep_level > 0
        if config.sleep_level > 0 and not self._can_sleep and rank == 0:
            logger.warning("rollout.sleep_level=%d has no effect: this build of vLLM cannot sleep", config.sleep_level)
        check_start(config)
        with undisturbed_process(), preserved_random_state(), ExitStack() as stack:
            prepare_import()
            from vllm import LLM

            self._stream = EngineStream()
            stack.enter_context(self._stream.entered())
            if config.tensor > 1 and not torch.cuda.is_available():
                stack.enter_context(private_segments(launch_id))
            stack.callback(unlink_broadcast_buffer)  # also when the engine is refused
            stack.enter_context(building(model_path, config))
            self._llm = LLM(**engine_arguments(model_path, config, seed + self.replica))
        _ALIVE.append(self._llm)

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        progress: Progress | None = None,
    ) -> list[list[Completion]]:
        """``num_responses`` completions for each prompt, on every rank of the replica.

        With a seed, response j to a prompt depends on (seed, prompt uid, j) and the weights alone; without one, on the calls before.
        That holds on one kind of machine: on GPUs vLLM samples with other kernels and another generator than on a CPU, and the same
        seed gives other tokens there.
        ``progress`` is called as responses get done.

        Raises:
            ValueError: a prompt or the wanted response is longer than the engine was built for; stop strings without tokenizer.
            RuntimeError: a weight update failed before.
        """
        self._require_usable(ENGINE_PARTS)
        self._check(prompts, sampling)
        if not prompts:
            return []
        seed = sampling.seed
        if seed is None:
            self._num_unseeded += 1
            seed = -(self._seed * 1_000_003 + self._num_unseeded)
        requests = [{"prompt_token_ids": list(prompt.token_ids)} for prompt in prompts]
        params = [vllm_sampling(sampling, request_seed(seed, prompt.uid), self._eos_token_ids) for prompt in prompts]
        with self._working() as llm, watched(llm.llm_engine, progress):
            outputs = llm.generate(requests, params, use_tqdm=False)
        return [[self._completion(output) for output in request.outputs] for request in outputs]

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """See protocols.RolloutEngine. Raises ValueError for a sequence that is longer than rollout.max_prompt_tokens."""
        self._require_usable(ENGINE_PARTS)
        longest = max(map(len, sequences))
        if longest > self._config.max_prompt_tokens:
            raise ValueError(
                f"score: a sequence has {longest} tokens, rollout.max_prompt_tokens is {self._config.max_prompt_tokens}; raise it"
            )
        requests = [{"prompt_token_ids": list(tokens)} for tokens in sequences]
        with self._working() as llm:
            outputs = llm.generate(requests, scoring(), use_tqdm=False)
        self._drop_cache()
        return [
            [scores[token].logprob for token, scores in zip(tokens[1:], output.prompt_logprobs[1:], strict=True)]
            for tokens, output in zip(sequences, outputs, strict=True)
        ]

    def load_weights(self, weights: Iterator[tuple[str, Tensor]], version: int, confirm: Callable[[], None] | None = None) -> None:
        """Replace all weights by HF-named whole tensors; every name of the checkpoint must come once, with its shape.

        A tensor must stay as it is until all tensors of its layer have come. ``confirm`` is called when all have, while the engine still
        refuses to generate.

        Raises:
            WeightSyncError: what comes is not what the checkpoint holds. Found at the first tensor, the engine keeps its old
                weights; found later, or on any other exception, it refuses to generate from then on.
        """
        self._require_usable(("weights",))
        checked = iter(CheckedStream(weights, self._expected, getattr(torch, self._config.dtype)))
        first = next(checked)
        with self._updating(version) as llm:
            llm.collective_rpc("receive_weights", args=(chain([first], checked),))
            if confirm is not None:
                confirm()

    def weight_boxes(self) -> list[Box]:
        """The parts of the checkpoint's tensors that this rank wants, and where it keeps them: recorded from vLLM's own loaders.

        Raises UndiscoveredError when a loader computes with the weights, for then no copy of slices can replace it. The weights stay.
        """
        self._require_usable(("weights",))
        if self._boxes is None:
            with self._working() as llm:
                self._boxes = llm.collective_rpc("discover_boxes", args=(self._expected,))[0]
        return self._boxes

    def declare_boxes(self, boxes: list[Box]) -> None:
        """Where ``weight_boxes`` raises: it returns these from now on. Keys are the names of vLLM's parameters."""
        with self._working() as llm:
            llm.collective_rpc("declare_boxes", args=(boxes,))
        self._boxes = boxes

    def update_weights(self, transfer: Transfer, version: int) -> None:
        """Collective. Replace all weights by what ``transfer(parameter, written)`` writes to the boxes of ``weight_boxes``, called
        before: ``parameter(key)`` is the tensor to write to, ``written(key)`` tells that its last box is in place. Any exception
        leaves the engine unusable.
        """
        self._require_usable(("weights",))
        with self._updating(version) as llm:
            llm.collective_rpc("receive_boxes", args=(transfer,))

    @contextmanager
    def _working(self) -> Iterator[LLM]:
        """vLLM at work: in its stream, and what it draws or seeds changes no generator of this process."""
        with self._stream.entered(), preserved_random_state():
            yield self._llm

    @contextmanager
    def _updating(self, version: int) -> Iterator[LLM]:
        """Between old and new weights the engine is unusable, and stays so after any exception."""
        self._failure = f"the update to weight version {version} did not finish"
        try:
            with self._working() as llm:
                yield llm
        except BaseException as error:
            self._failure = f"the update to weight version {version} failed: {error}"
            raise
        # Keys and values computed with the old weights would be used for every prompt that shares a block with an old one.
        self._drop_cache()
        self._failure = None
        self.weight_version = version

    def _drop_cache(self) -> None:
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM kept its prefix cache although no request is running")

    def sleep(self) -> None:
        """Free what training needs: level 1 moves the weights to the host, level 2 drops them; both drop the cache."""
        if self._can_sleep and self._asleep != set(ENGINE_PARTS):
            with self._working() as llm:
                llm.sleep(level=self._config.sleep_level)
            self._asleep = set(ENGINE_PARTS)
            if self._config.sleep_level == 2:
                self.weight_version = -1

    def wake(self, parts: Sequence[str] = ENGINE_PARTS) -> None:
        """Undo sleep; after level 2 the weights are undefined until the next ``load_weights``."""
        wanted = [part for part in parts if part in self._asleep]
        if wanted:
            with self._working() as llm:
                llm.wake_up(tags=wanted)
            self._asleep -= set(wanted)

    def memory_bytes(self) -> int:
        """What vLLM's own allocator holds of the parts that are awake (0 without sleep mode, when torch's allocator has all)."""
        if not self._can_sleep:
            return 0
        from vllm.device_allocator.cumem import CuMemAllocator

        # Asleep ones are listed too. Besides weights and cache there are smaller ones, by other tags, that sleep
        # with these two and wake with the first of them.
        allocations = CuMemAllocator.get_instance().pointer_to_data.values()
        return sum(data.handle[1] for data in allocations if not data.is_asleep)

    def _completion(self, output: CompletionOutput) -> Completion:
        token_ids, flat = list(output.token_ids), output.logprobs
        assert list(flat.token_ids) == token_ids, "one logprob for each sampled token"
        truncated = output.finish_reason == "length"
        return Completion(token_ids, flat.logprobs, truncated, self.weight_version)

    def _require_usable(self, parts: Sequence[str]) -> None:
        if self._failure is not None:
            raise RuntimeError(f"the rollout engine is unusable, its weights are half replaced: {self._failure}")
        missing = self._asleep & set(parts)
        if missing:
            raise RuntimeError(f"the {' and '.join(sorted(missing))} of the rollout engine are asleep; call wake() first")

    def _check(self, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        config = self._config
        if sampling.max_response_tokens > config.max_response_tokens:
            raise ValueError(
                f"sampling: {sampling.max_response_tokens} response tokens wanted, rollout.max_response_tokens is "
                f"{config.max_response_tokens}; raise it"
            )
        if sampling.stop and not config.stop:
            raise ValueError(f"sampling: stop strings {list(sampling.stop)} need rollout.stop, with which the engine loads its tokenizer")
        for prompt in prompts:
            if prompt.multimodal is not None:
                raise ValueError(f"prompt {prompt.uid}: multimodal input is not supported by this engine; remove it")
            if len(prompt.token_ids) > config.max_prompt_tokens:
                raise ValueError(
                    f"prompt {prompt.uid}: {len(prompt.token_ids)} tokens, rollout.max_prompt_tokens is {config.max_prompt_tokens}; "
                    "raise it or drop the prompt"
                )


def check_start(config: RolloutConfig) -> None:
    """Raises ValueError for what stops an engine on this machine before it is built."""
    require_vllm()
    if torch.cuda.is_available():
        require_fixed_segments(config, os.environ)


def engine_arguments(model_path: str, config: RolloutConfig, seed: int) -> dict[str, Any]:
    """Arguments of ``vllm.LLM``. The external launcher is used for one rank a replica too: it takes the device of LOCAL_RANK."""
    arguments: dict[str, Any] = {
        "model": model_path,
        "tensor_parallel_size": config.tensor,
        "distributed_executor_backend": "external_launcher",
        "worker_extension_cls": "megatron_rl.rollout.worker.WeightReceiver",
        "dtype": config.dtype,
        "quantization": None if config.quantization is None else VLLM_QUANTIZATION[config.quantization],
        "max_model_len": config.max_prompt_tokens + config.max_response_tokens,
        "enforce_eager": config.enforce_eager,
        "enable_prefix_caching": config.enable_prefix_caching,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",  # not the sampling defaults of the checkpoint
        "skip_tokenizer_init": not config.stop,
        "use_tqdm_on_load": False,
        "seed": seed,
    }
    if config.max_num_seqs is not None:
        arguments["max_num_seqs"] = config.max_num_seqs
    if config.kv_cache_gib is not None:
        arguments["kv_cache_memory_bytes"] = int(config.kv_cache_gib * 2**30)
    if not torch.cuda.is_available():
        # A prefill in parts draws a token to throw away and takes the draw back, which CPU generators cannot.
        longest = config.max_prompt_tokens + config.max_response_tokens
        arguments |= {"enable_chunked_prefill": False, "max_num_batched_tokens": max(longest, 8192)}
    else:
        arguments["gpu_memory_utilization"] = config.gpu_memory_utilization
        arguments["enable_sleep_mode"] = config.sleep_level > 0
    return arguments


def unlink_broadcast_buffer() -> None:
    """Every rank has mapped the buffer of the tensor-parallel group when the engine is built; without its name it goes with its last
    process, however that ends, and nothing reports it as leaked."""
    from vllm.distributed.parallel_state import get_tp_group, model_parallel_is_initialized

    if not model_parallel_is_initialized():
        return
    queue = get_tp_group().mq_broadcaster
    buffer = None if queue is None else queue.buffer
    if buffer is not None and buffer.is_creator:
        buffer.shared_memory.unlink()
        buffer.is_creator = False


def eos_token_ids(model_path: Path) -> tuple[int, ...]:
    """End tokens of a HF directory: of generation_config.json where it names some, else of config.json."""
    for name in ("generation_config.json", "config.json"):
        file = model_path / name
        value = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file.is_file() else None
        if value is not None:
            return tuple(value) if isinstance(value, list) else (value,)
    return ()


def prepare_import() -> None:
    """The settings that vLLM reads from the environment when it is imported."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine lives in this process
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if not torch.cuda.is_available():
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # else small sampling functions are compiled: seconds, and a C++ compiler is needed
        logging.getLogger("torch._library.triton").setLevel(logging.ERROR)  # that there is no Triton for a CPU is no news


@contextmanager
def undisturbed_process() -> Iterator[None]:
    """Undo what building an engine does to the process: environment variables, and torch.set_num_threads turned into nothing."""
    environment = {name: os.environ[name] for name in RESTORED_VARIABLES if name in os.environ}
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(num_threads)
        for name in RESTORED_VARIABLES:
            os.environ.pop(name, None)
        os.environ.update(environment)
