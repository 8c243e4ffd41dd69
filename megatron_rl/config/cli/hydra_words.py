"""What Hydra's own words lead to here: its language is read, its launcher is not used.

Under torchrun Hydra's runner would make a job, a folder and a log of every rank. The page that
says why, and what takes the place of what: ``conf/README.md``.
"""

from __future__ import annotations

import re

SWEEP = "python -m megatron_rl.sweep"

# A key of Hydra's own settings -> the way here; the first that fits.
ANSWERS = (
    (
        r"hydra[./]sweep(\.|$)",
        f"the folder of a sweep is {SWEEP} --out DIR, each run has one of its own below it",
    ),
    (
        r"hydra[./](run\.dir|job\.chdir|output_subdir|run$|job\.name)",
        "the folder of a run is run_dir=DIR, and no run changes the folder it is started in",
    ),
    (
        r"hydra[./](launcher|mode)",
        "runs are started by torchrun, on Slurm by sbatch examples/slurm/train.sbatch, several of "
        f"them by {SWEEP} (with --sbatch on Slurm)",
    ),
    (
        r"hydra[./]sweeper",
        f"combinations of values are runs of {SWEEP}, key=a,b; there is no other search",
    ),
    (
        r"hydra[./](job_logging|hydra_logging|verbose|callbacks)",
        "what is logged, and where, is set by logging.KEY",
    ),
    (r"hydra[./]searchpath", "a folder of groups of your own is given by --config-dir DIR"),
    (
        r"hydra([./]|$)",
        "Hydra's language is read here, its launcher and its own settings are not used; see "
        "conf/README.md of the repository",
    ),
)


def answer(key: str) -> str | None:
    """The way here for a key of Hydra's own settings, None for any other key.

    Example: ``answer("hydra.run.dir")`` names ``run_dir``.
    """
    return next((way for pattern, way in ANSWERS if re.match(pattern, key)), None)
