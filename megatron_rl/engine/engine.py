"""The sampler: vLLM inside the training processes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.config.schema import RolloutConfig
from megatron_rl.engine.arguments import engine_arguments
from megatron_rl.engine.cpu_rotary import rotate_strided_parts
from megatron_rl.engine.request_tracking import RequestTracker
from megatron_rl.engine.requests import MultimodalConfig, check_request, request
from megatron_rl.engine.requirements import building, check_start
from megatron_rl.engine.routed_experts import ExpertReader
from megatron_rl.engine.sampling import SCORING, answered_once, eos_token_ids
from megatron_rl.engine.side_effects import (
    EngineStream,
    import_model_class,
    prepare_import,
    private_segments,
    undisturbed_process,
    unlink_broadcast_buffer,
)
from megatron_rl.engine.weights import lazy_loading
from megatron_rl.engine.weights.stream import checked_stream, expected_tensors
from megatron_rl.protocols import ENGINE_PARTS, NOTHING, Transfer
from megatron_rl.runtime.guard.activity import ACTIVITY
from megatron_rl.runtime.launch import lift_time_limits
from megatron_rl.runtime.random_state import preserved_random_state
from megatron_rl.types import Completion, Image, Prompt, Sampling, Shard

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.outputs import RequestOutput

logger = logging.getLogger(__name__)

# An engine's destructor destroys the default process group, which the policy still uses, so
# engines are never freed.
_ALIVE: list[LLM] = []


class VllmEngine:
    """One rank of a rollout engine.

    Every rank of the world builds one, after torch.distributed and Megatron were initialized.
    Replica r is the ranks ``[r * tensor, (r + 1) * tensor)``; they run in lockstep and must pass
    the same requests.

    Logprobs are of the distribution sampled from: logits / temperature, then top-k and top-p,
    renormalized. Greedy sampling (temperature 0) has no such distribution: its logprobs are those
    at temperature 1, not truncated.
    """

    def __init__(
        self,
        model_path: str,
        config: RolloutConfig,
        *,
        seed: int,
        launch_id: str,
        multimodal: MultimodalConfig | None = None,
        expected: lazy_loading.Shapes | None = None,
    ) -> None:
        """Collective. ``launch_id``: unique to the launch, equal on its ranks. ``multimodal``: None
        where no prompt has images. ``expected``: the tensors (as ``expected_tensors`` gives them)
        that a weight sync brings before the first prompt, so that the files are not read; where
        a sync does not reach every weight of the engine they are, and the reason is logged.

        Raises:
            ValueError: the world is not a multiple of ``rollout.tensor``; no checkpoint in
                ``model_path``; vLLM refuses a setting, or is not of the supported version.
        """
        assert dist.is_initialized(), (
            "initialize torch.distributed before the engine, or vLLM makes a world of one"
        )
        rank = dist.get_rank()
        world_size = dist.get_world_size()
        if world_size % config.ranks:
            raise ValueError(
                f"rollout.tensor: {world_size} processes do not divide into groups of"
                f" {config.ranks}; choose a divisor of {world_size}"
            )
        self.replica = rank // config.ranks
        self.num_replicas = world_size // config.ranks
        self.weight_version = 0
        self._config = config
        self._multimodal = multimodal
        self._seed = seed
        self._num_unseeded = 0
        self._failure: str | None = None
        self._expected = expected or expected_tensors(Path(model_path))
        self._asleep: set[str] = set()
        self._can_sleep = torch.cuda.is_available() and config.sleep_level > 0
        if config.sleep_level > 0 and not self._can_sleep and rank == 0:
            logger.warning(
                "rollout.sleep_level=%d has no effect: this build of vLLM cannot sleep",
                config.sleep_level,
            )
        check_start(config)
        self._is_filled = expected is None or not lazy_loading.can_wait_for_sync(config)
        self._stream, self._llm = self._build(model_path, launch_id)
        experts = ExpertReader(self._llm) if config.router_replay == "rollout" else None
        self._tracker = RequestTracker(eos_token_ids(Path(model_path)), multimodal, experts)
        # What it works on at a time, and some to continue with until more is handed out.
        self.capacity = self._llm.llm_engine.vllm_config.scheduler_config.max_num_seqs * 9 // 8 + 1
        _ALIVE.append(self._llm)
        if not self._is_filled:
            self._read_what_no_sync_fills()

    def _read_what_no_sync_fills(self) -> None:
        """Collective: the files after all, where a rank finds weights that no sync reaches."""
        with self._working() as llm:
            reason = llm.collective_rpc("unreached", args=(self._expected,))[0]
            if not lazy_loading.all_reached(reason):
                llm.collective_rpc("load_files", args=(self._expected,))
                self._is_filled = True

    def _build(self, model_path: str, launch_id: str) -> tuple[EngineStream, LLM]:
        """vLLM and the stream that it was built in."""
        seed = self._seed + self.replica
        empty = not self._is_filled
        with undisturbed_process(), preserved_random_state(), ExitStack() as stack:
            prepare_import(batch_invariant=self._config.batch_invariant)
            from vllm import LLM  # after prepare_import, whose settings it reads

            lazy_loading.register_loader()
            rotate_strided_parts()
            arguments = engine_arguments(
                model_path, self._config, seed, self._multimodal, without_weights=empty
            )
            # vLLM learns of streams that are set after its import, so the stream comes now.
            stream = EngineStream()
            stack.enter_context(stream.entered())
            if self._config.ranks > 1 and not torch.cuda.is_available():
                stack.enter_context(private_segments(launch_id))
            stack.callback(unlink_broadcast_buffer)  # also when the engine is refused
            stack.enter_context(building(model_path, self._config))
            import_model_class(model_path)
            llm = LLM(**arguments)
            if self._config.pipeline > 1:
                llm.collective_rpc("make_stage_buffers")
            lift_time_limits()
            ACTIVITY.note("building the rollout engine")
            return stream, llm

    def submit(
        self,
        prompt: Prompt,
        responses: Sequence[int],
        sampling: Sampling,
        so_far: Mapping[int, Sequence[int]] = NOTHING,
    ) -> list[int]:
        """See ``protocols.Generator``, as are the next four. Without a seed a response depends on
        the calls before. On GPUs vLLM samples with other kernels and another generator than on a
        CPU, so the same seed gives other tokens there.

        Raises:
            ValueError: the prompt or the requested response is longer than the engine was built
                for; stop strings without tokenizer; images that do not fit their tokens.
            RuntimeError: a weight update failed before.
        """
        self._require_usable(ENGINE_PARTS)
        check_request(prompt, sampling, self._config)
        seed = sampling.seed
        if seed is None:
            # Negative, so that it meets no seed of a step; a large prime keeps runs apart.
            self._num_unseeded += 1
            seed = -(self._seed * 1_000_003 + self._num_unseeded)
        with self._working() as llm:
            seeded = replace(sampling, seed=seed)
            there = {number: so_far.get(number, ()) for number in responses}
            return self._tracker.begin(llm, prompt, seeded, there)

    def poll(self) -> list[tuple[int, Completion]]:
        """With nothing to do it returns at once. After an exception nothing is open any more:
        RuntimeError where vLLM read another prompt than it was given."""
        with self._working() as llm:
            return self._tracker.stepped(llm, self.weight_version)

    def abort(self, request_ids: Sequence[int]) -> int:
        with self._working() as llm:
            return self._tracker.drop(llm, request_ids)

    def pause(self, request_ids: Sequence[int]) -> list[Completion]:
        with self._working() as llm:
            return self._tracker.pause(llm, request_ids, self.weight_version)

    def running_lengths(self) -> dict[int, int]:
        return self._tracker.lengths(self._llm)

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[list[Completion]]:
        """All responses to some prompts, on every rank of the replica; for callers that have
        the engine to themselves and wait. Raises what ``submit`` and ``poll`` do."""
        every = range(sampling.num_responses)
        try:
            request_ids = [self.submit(prompt, every, sampling) for prompt in prompts]
        except Exception:
            self.abort(self._tracker.request_ids)
            raise
        ended: dict[int, Completion] = {}
        while self._tracker.request_ids:
            ended.update(self.poll())
        return [[ended[request_id] for request_id in of_prompt] for of_prompt in request_ids]

    def score(
        self, sequences: Sequence[Sequence[int]], images: Sequence[tuple[Image, ...]] = ()
    ) -> list[list[float]]:
        """See ``protocols.RolloutEngine``. Raises ValueError where a sequence is longer than
        rollout.max_prompt_tokens."""
        self._require_usable(ENGINE_PARTS)
        longest = max(map(len, sequences))
        if longest > self._config.max_prompt_tokens:
            raise ValueError(
                f"score: a sequence has {longest} tokens, rollout.max_prompt_tokens is"
                f" {self._config.max_prompt_tokens}; raise it"
            )
        requests = [
            request(tokens, pictures, self._multimodal, "score")
            for tokens, pictures in zip_longest(sequences, images, fillvalue=())
        ]
        with self._working() as llm:
            outputs = llm.generate(requests, answered_once(**SCORING), use_tqdm=False)
        self._drop_cache()
        return [
            _prompt_logprobs(tokens, output)
            for tokens, output in zip(sequences, outputs, strict=True)
        ]

    def load_weights(
        self,
        weights: Iterator[tuple[str, Tensor]],
        version: int,
        confirm: Callable[[], None] | None = None,
    ) -> None:
        """See ``protocols.WholeWeightSink``. Every name of the checkpoint must come once, with its
        shape. A tensor must stay unchanged until all tensors of its layer have arrived.

        Raises:
            WeightSyncError: a tensor is not one of the checkpoint. At the first tensor the engine
                keeps its old weights; later, or on any other exception, it will not generate.
        """
        self._require_usable(("weights",))
        checked = checked_stream(weights, self._expected, getattr(torch, self._config.dtype))
        # Checked before the engine is marked unusable: a stream that is wrong from its start
        # leaves the old weights in place.
        first = next(checked)
        with self._updating(version) as llm:
            received = (chain([first], checked), self._expected)
            llm.collective_rpc("receive_weights", args=received)
            if confirm is not None:
                confirm()

    def weight_shards(self) -> list[Shard]:
        """The slices of the checkpoint's tensors that this rank holds, and where.

        Recorded from vLLM's own loaders; the weights stay as they are.

        Raises:
            UndiscoveredError: a loader computes with the weights: copying slices cannot replace it.
        """
        self._require_usable(("weights",))
        with self._working() as llm:
            return llm.collective_rpc("discover_shards", args=(self._expected,))[0]

    def update_weights(self, transfer: Transfer, version: int) -> None:
        """Collective: see ``protocols.WeightSink``. ``weight_shards`` was called before."""
        self._require_usable(("weights",))
        with self._updating(version) as llm:
            llm.collective_rpc("receive_shards", args=(transfer,))

    @contextmanager
    def _working(self) -> Iterator[LLM]:
        """vLLM in its own stream; the random generators of this process stay untouched."""
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
        self._drop_cache()
        self._failure = None
        self._is_filled = True
        self.weight_version = version

    def _drop_cache(self) -> None:
        """Keys and values of the old weights would be reused for every prompt that shares a block
        with an earlier one, and features of the old tower for every image that comes again."""
        if self._multimodal is not None:
            self._llm.llm_engine.reset_encoder_cache()
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM kept its prefix cache although no request is running")

    def sleep(self) -> None:
        """Frees the device for training. Level 1 moves the weights to the host, level 2 drops them;
        both drop the cache."""
        if self._can_sleep and self._asleep != set(ENGINE_PARTS):
            with self._working() as llm:
                llm.sleep(level=self._config.sleep_level)
            self._asleep = set(ENGINE_PARTS)
            if self._config.sleep_level == 2:
                self.weight_version = -1  # so that the next sync sends them in any case

    def wake(self, parts: Sequence[str] = ENGINE_PARTS) -> None:
        """Undoes sleep; after level 2 the weights are undefined until the next ``load_weights``."""
        asleep = [part for part in parts if part in self._asleep]
        if asleep:
            with self._working() as llm:
                llm.wake_up(tags=asleep)
                if "weights" in asleep and self._config.sleep_level == 2:
                    llm.collective_rpc("zero_positions")
            self._asleep -= set(asleep)

    def memory_bytes(self) -> int:
        """Bytes in vLLM's own allocator that are awake; 0 without sleep mode, where torch's
        allocator holds everything."""
        if not self._can_sleep:
            return 0
        from vllm.device_allocator.cumem import CuMemAllocator

        # Sleeping allocations are listed too. Besides weights and cache there are smaller ones
        # with other tags, which sleep with these two and wake with the first of them.
        allocations = CuMemAllocator.get_instance().pointer_to_data.values()
        return sum(data.handle[1] for data in allocations if not data.is_asleep)

    def _require_usable(self, parts: Sequence[str]) -> None:
        if self._failure is not None:
            raise RuntimeError(
                f"the rollout engine is unusable, its weights are half replaced: {self._failure}"
            )
        if not self._is_filled and tuple(parts) != ("weights",):
            raise RuntimeError(
                "the rollout engine was built without weights, and no weight sync has brought them"
            )
        missing = self._asleep & set(parts)
        if missing:
            raise RuntimeError(
                f"the {' and '.join(sorted(missing))} of the rollout engine are asleep; call wake()"
                " first"
            )


def _prompt_logprobs(tokens: Sequence[int], output: RequestOutput) -> list[float]:
    """Logprob of every token but the first, which follows nothing."""
    by_token = output.prompt_logprobs[1:]
    return [scores[token].logprob for token, scores in zip(tokens[1:], by_token, strict=True)]
