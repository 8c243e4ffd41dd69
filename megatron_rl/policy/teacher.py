"""Teachers: frozen models beside the policy, of its vocabulary and of any size."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_rl.config.rules.teacher_rules import teacher_of
from megatron_rl.models import read_architecture
from megatron_rl.models.parameter_map import padded_vocab
from megatron_rl.passes import LocalBatch, Outputs, TokenScores
from megatron_rl.policy.model import build_chunks, transformer_config
from megatron_rl.policy.passes.forward import Passes, ScoreBuffer
from megatron_rl.policy.passes.routing import Routing
from megatron_rl.policy.state import weights
from megatron_rl.policy.state.offload import (
    Offload,
    dispatcher_tensors,
    release_caches,
    training_tensors,
)
from megatron_rl.runtime.device import platform

_PARTS = ("weights",)
MegatronPolicy = Any  # its module imports this one


class FrozenTeacher:
    """Implements ``protocols.Teacher``: a model of ``model.teacher`` in the layout of ``policy``.

    Its weights are on the device during its passes alone. It takes micro-batches, temperatures and
    the number format of the policy, but for FP8.

    Raises:
        ValueError: the folder does not hold such a model.
    """

    def __init__(self, folder: str, policy: MegatronPolicy) -> None:
        path = Path(folder)
        arch, hf_config = read_architecture(path)
        weights.check_directory(path, arch)
        settings, model, ranks = policy.settings, policy.model, policy.ranks
        self._folder = folder
        self._model = model
        self._ranks = ranks
        self._device = policy.device
        precision = policy.precision.model_copy(update={"fp8": None})
        with platform():
            config = transformer_config(arch, policy.parallel, precision)
            most_tokens = settings.max_sequence_tokens
            self._modules = build_chunks(config, arch, hf_config, model, most_tokens)
            rows = padded_vocab(arch.vocab_size, model.make_vocab_divisible_by, ranks.tensor)
            held = weights.local_parameters(self._modules, arch, ranks, rows)
            weights.load(held, arch, path, ranks, require_finite=settings.require_finite)
        for item in held:
            item.tensor.requires_grad_(False)
        routing = Routing(self._modules, arch, ranks)
        self._passes = Passes(self._modules, ranks, arch.vocab_size, settings.temperature, routing)
        # The dispatcher of experts decides how micro-batches are filled up.
        self._batching = replace(policy.batching, config=config)
        self._dispatchers = dispatcher_tensors(self._modules)
        tensors = {"weights": training_tensors(self._modules, None)["weights"]}
        self._offload = Offload(tensors, (), policy.device, constant=True)
        self._offload.offload(_PARTS)

    def teaches(self, source: str) -> bool:
        return teacher_of(self._model, source) == self._folder

    def score(self, batch: LocalBatch, outputs: Outputs = ()) -> TokenScores:
        """See protocols.Teacher. It chooses its experts itself."""
        batch = replace(batch, batch=replace(batch.batch, experts=None))
        num_tokens = int(batch.batch.response_lengths.sum())
        buffer = ScoreBuffer(num_tokens, outputs, self._ranks, self._device)
        self._offload.reload()
        with platform():
            buffer.fill(self._passes, self._batching.packed(*batch.work), outputs)
        release_caches(self._modules, self._dispatchers)
        self._offload.offload(_PARTS)
        return buffer.read()
