"""Is training still sane? Judges every optimizer step and the agreement of sampler and trainer, and
stops a run that is not."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_rl.config.sections import MismatchLimits, NonFiniteConfig
from megatron_rl.errors import NonFiniteError, first_line
from megatron_rl.passes import UpdateResult
from megatron_rl.rollouts.rows.experience import Experience

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Minibatch:
    """All that goes into one optimizer step: ``rows`` of a scored experience."""

    step: int
    number: int  # of the minibatch within the step, from 1
    experience: Experience
    rows: Sequence[int]


# Collective: writes the minibatch, with the weights as they are now, and returns where. The result
# is None before the update.
WriteBundle = Callable[[Minibatch, UpdateResult | None], Path]


@dataclass
class Health:
    """Judges values that are equal on every rank, so that all ranks come to the same verdict."""

    nonfinite: NonFiniteConfig
    limits: MismatchLimits
    write_bundle: WriteBundle
    _skipped_in_a_row: int = field(default=0, init=False)

    def before(self, minibatch: Minibatch) -> None:
        """Collective: the bundle of the first minibatch of step ``nonfinite.bundle_step``."""
        if minibatch.step == self.nonfinite.bundle_step and minibatch.number == 1:
            path = self.write_bundle(minibatch, None)
            logger.info("step %d: bundle written to %s", minibatch.step, path)

    def after(self, minibatch: Minibatch, result: UpdateResult) -> None:
        """Counts skipped steps. Where they stop the run it writes a bundle, which is collective.

        Raises:
            NonFiniteError: ``nonfinite.stop_after`` optimizer steps in a row were skipped.
        """
        if not result.skipped:
            self._skipped_in_a_row = 0
            return
        self._skipped_in_a_row += 1
        where = f"step {minibatch.step}, minibatch {minibatch.number}"
        found = f"{where}: loss {result.loss:g}, gradient norm {result.grad_norm:g}"
        skipped = self._skipped_in_a_row
        message = "%s; not finite, so the optimizer step is skipped (%d in a row)"
        logger.warning(message, found, skipped)
        if skipped == self.nonfinite.stop_after:
            raise NonFiniteError(
                f"{found}; {skipped} optimizer steps in a row were skipped (nonfinite.stop_after)."
                f" {self._bundle(minibatch, result)} The usual causes are optim.learning_rate and"
                " optim.clip_grad; resume=auto continues from the last checkpoint"
            )

    def _bundle(self, minibatch: Minibatch, result: UpdateResult) -> str:
        """Writes the bundle; a disk that is full must not hide why the run stops."""
        try:
            path = self.write_bundle(minibatch, result)
        except OSError as error:
            return f"The minibatch could not be written: {first_line(error)}."
        return f"To see where it comes from: python tools/replay_step.py {path}."

    def check_mismatch(self, step: int, mismatch: Mapping[str, float], *, skipped: bool) -> None:
        """Compares sampler and trainer with the limits; NaN is above every limit. ``skipped``: an
        optimizer step of this step was skipped, so a large difference does not stop the run.

        Raises:
            ValueError: the largest difference is above ``mismatch_limits.abort_above``.
        """
        mean = mismatch["mismatch/logprob_abs_diff_mean"]
        warn_above = self.limits.warn_above
        if warn_above is not None and not mean <= warn_above:
            logger.warning(
                "step %d: mismatch/logprob_abs_diff_mean = %.3g is above"
                " mismatch_limits.warn_above = %g",
                step,
                mean,
                warn_above,
            )
        largest = mismatch["mismatch/logprob_abs_diff_max"]
        abort_above = self.limits.abort_above
        if abort_above is not None and not largest <= abort_above and not skipped:
            raise ValueError(
                f"step {step}: mismatch/logprob_abs_diff_max = {largest:.3g} is above"
                f" mismatch_limits.abort_above = {abort_above:g}; the sampler and the trainer hold"
                " different weights or compute a different model; compare precisions, or raise the"
                " limit"
            )
