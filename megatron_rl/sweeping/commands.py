"""The command that starts one run here, and the one that gives runs to Slurm."""

import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.sweeping.trials import Trial

_MARK = "megatron_rl.sweep"


def local(trial: Trial, nproc: int, options: Sequence[str] = ()) -> list[str]:
    """torchrun with one run of ``nproc`` processes.

    Args:
        options: options of ``megatron_rl.train``.
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    program = ["-m", "megatron_rl.train", *options, *trial.overrides]
    return [*torchrun, f"--nproc-per-node={nproc}", *program]


@dataclass(frozen=True)
class Slurm:
    """The Slurm submission of a sweep."""

    out: Path  # the folder of the sweep
    nproc: int  # processes a node
    sbatch: Sequence[str]  # options of the user for sbatch
    at_a_time: int | None = None  # runs of an array at one time; None: as many as Slurm can run
    options: Sequence[str] = ()  # options of ``megatron_rl.train``

    def command(self, trials: Sequence[Trial], file: Path) -> list[str]:
        """sbatch with the script of examples/slurm: a job for one trial, an array for several.

        Args:
            file: what ``write_trials`` writes; task N of the array runs its line N, from 0 on.

        Raises:
            ValueError: there is no batch script next to an installed package.
        """
        script = Path(__file__).resolve().parents[2] / "examples" / "slurm" / "train.sbatch"
        if not script.is_file():
            raise ValueError(
                f"--sbatch: {script} does not exist; start the sweep from a copy of the repository"
            )
        of_script = [str(script), "--nproc", str(self.nproc), *self.options]
        own = [f"--comment={self._comment}"]
        if len(trials) == 1:
            return ["sbatch", *own, *self.sbatch, *of_script, *trials[0].overrides]
        limit = "" if self.at_a_time is None else f"%{self.at_a_time}"
        own.append(f"--array=0-{len(trials) - 1}{limit}")
        return ["sbatch", *own, *self.sbatch, *of_script, "--trials", str(file)]

    @property
    def _comment(self) -> str:
        """The comment that marks jobs of this sweep in the queue."""
        return f"{_MARK} {self.out.resolve()}"

    def queued(self) -> list[str]:
        """The jobs of this sweep that wait or run, as squeue names them: ``12_[0-3]``, ``12_4``.

        Raises:
            ValueError: there is no squeue, or it fails.
        """
        words = ["squeue", "--me", "--noheader", "--format=%i %k"]
        done = run(words, stdout=subprocess.PIPE, text=True)
        # A comment has spaces of its own.
        jobs = [line.partition(" ") for line in done.stdout.splitlines()]
        return [job for job, _, comment in jobs if comment.strip() == self._comment]

    def new_file(self) -> Path:
        """A name that no earlier array uses: its tasks read their lines when they start."""
        number = 1
        while (file := self.out.resolve() / f"trials.{number}.txt").exists():
            number += 1
        return file


def write_trials(file: Path, trials: Sequence[Trial]) -> None:
    """One line a trial: its overrides as words of a shell.

    Raises:
        ValueError: an override goes over several lines.
    """
    for trial in trials:
        if any("\n" in text for text in trial.overrides):
            raise ValueError(
                f"--sbatch: an override of {trial.name} has a line break; write it as \\n"
            )
    file.parent.mkdir(parents=True, exist_ok=True)
    # "x": waiting tasks of an earlier array still read their own file.
    with file.open("x", encoding="utf-8") as stream:
        stream.writelines(f"{shlex.join(trial.overrides)}\n" for trial in trials)


def run(words: Sequence[str], **how: Any) -> subprocess.CompletedProcess[str]:
    """Runs a program of Slurm; its output is on the console, unless ``how`` says otherwise.

    Raises:
        ValueError: there is no such program, or it refuses.
    """
    try:
        done = subprocess.run(words, check=False, **how)
    except FileNotFoundError:
        raise ValueError(f"{words[0]}: no such program on this machine") from None
    if done.returncode:
        raise ValueError(
            f"{words[0]} ended with exit code {done.returncode}; nothing was submitted"
        )
    return done
