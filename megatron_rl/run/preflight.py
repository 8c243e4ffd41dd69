"""Checks before policy and engine are built: folder, disk space, checkpoint, keys."""

import logging
from pathlib import Path

from megatron_rl.checkpoints import directory, facts, peft_format, safe_load
from megatron_rl.config.schema import Config
from megatron_rl.engine.requirements import check_start
from megatron_rl.errors import ConfigError
from megatron_rl.models import Architecture, read_architecture
from megatron_rl.models.adapters import with_adapters
from megatron_rl.models.experts import router_problems
from megatron_rl.models.problems import adapter_problems, family_problems
from megatron_rl.reporting.metrics_file import check_rows
from megatron_rl.reporting.tracking import check_accounts
from megatron_rl.run.files import METRICS, SAMPLES
from megatron_rl.run.push import check_token
from megatron_rl.run.start import CHECKPOINTS, EXPORTS, ResumePoint
from megatron_rl.runtime import disk
from megatron_rl.runtime.guard import lock
from megatron_rl.runtime.guard.first_failure import FAILED_HOST

logger = logging.getLogger(__name__)


def claim(config: Config, launch_id: str) -> None:
    """Makes ``run_dir``, locks it for this process, removes what a dead run left half written.

    Raises:
        ValueError: it cannot be made or written, another run is using it, or its rows are damaged.
    """
    folder = Path(config.run_dir)
    remedy = "give a run_dir that is, or can be made, a folder to write into"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.hold(folder, launch_id)
        (folder / FAILED_HOST).unlink(missing_ok=True)  # of an earlier start
    except OSError as error:
        why = f"{error.strerror}: {error.filename}"
        if isinstance(error, FileExistsError):
            why = "it is a link that leads nowhere" if folder.is_symlink() else "it is no folder"
        raise ValueError(f"run_dir = {folder}: cannot be written ({why}); {remedy}") from None
    for root in (folder, folder / CHECKPOINTS, folder / EXPORTS):
        for path in directory.clean(root):
            logger.info("removed %s, which a run that died had left", path)
    for name in (METRICS, SAMPLES):
        check_rows(folder / name)


def check_before_build(config: Config, start: ResumePoint, keep_reference: bool) -> None:
    """On rank 0: checks that an engine can be built here, the checkpoint fits the model, the disk
    has room, and services have their keys.

    Raises:
        ValueError: one of these is not so.
    """
    check_start(config.rollout)
    arch, _ = read_architecture(Path(config.model.path))
    problems = family_problems(arch, config.model, config.parallel, config.precision)
    problems += adapter_problems(arch, config.model, config.parallel, config.precision)
    problems += router_problems(arch, config.model, config.optim, keep_reference)
    if problems:
        raise ConfigError(problems, "the model")
    arch = with_adapters(arch, config.model.lora)
    if arch.adapter_slots:
        keep_reference = False  # it is the model without adapters
        if config.model.lora.path is not None:
            peft_format.check(Path(config.model.lora.path), arch, config.model.lora)
    if start.checkpoint is not None:
        info = directory.check(start.checkpoint)
        wanted = facts.describe(
            arch, config.model, config.precision, config.parallel, reference=keep_reference
        )
        facts.refuse_other(start.checkpoint, info, wanted)
        safe_load.check_files(start.checkpoint)
    _check_room(config, arch, keep_reference)
    check_accounts(config.logging)
    check_token(config.hub.push)


def _check_room(config: Config, arch: Architecture, keep_reference: bool) -> None:
    precision = config.precision
    divisible_by = config.model.make_vocab_divisible_by
    folder = Path(config.run_dir)
    checkpoint_bytes = facts.checkpoint_bytes(
        facts.num_saved(arch, divisible_by),
        precision.params,
        precision.adam_moments,
        distributed_optimizer=config.parallel.distributed_optimizer,
        reference=keep_reference,
    )
    exported = config.checkpoint.export_at_end
    parameters = facts.num_parameters(arch, divisible_by)
    export_bytes = facts.export_bytes(parameters, precision.params) if exported else 0
    free = disk.free_bytes(folder)
    export = f" and the export {disk.as_text(export_bytes)}" if exported else ""
    sizes = f"one checkpoint takes {disk.as_text(checkpoint_bytes)}{export}"
    sizes += f", {disk.as_text(free)} are free there"
    if free < checkpoint_bytes + export_bytes:
        raise ValueError(
            f"run_dir = {folder}: no space left for its checkpoints: {sizes}; delete files, or give"
            " a run_dir on another disk"
        )
    # A new checkpoint is written before the oldest one goes.
    kept = config.checkpoint
    num_kept = kept.keep + 1 + int(kept.keep_best)
    keys = f"checkpoint.keep = {kept.keep}"
    if kept.keep_every_steps:
        num_kept += config.trainer.steps // kept.keep_every_steps
        keys += f" with keep_every_steps = {kept.keep_every_steps}"
    if free + disk.used_bytes(folder / CHECKPOINTS) < num_kept * checkpoint_bytes + export_bytes:
        logger.warning("run_dir = %s: %s; %s will fill the disk", folder, sizes, keys)
