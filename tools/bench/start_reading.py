"""How much of a model's files the ranks of a launch read, as the system counts it.

    python tools/bench/start_reading.py --model TOY --nproc 4 -- parallel=single rollout.tensor=1

Every rank gets a copy of the model of its own, mounted under one name (so: as root, on Linux), and
none of it is in memory at the start. Pages of a copy that are in memory at any time, its rank has
read, through whatever library, by mapping or by calls; the system reads ahead, so they may be more
than were asked for. Pages that one rank reads twice count once. The launches: one of one step,
one of another step that resumes from its checkpoint, and one in which every rank reads the policy's
weights for itself. The model is that of --model with wider layers and random weights, so that what
the system reads ahead is little beside it. Words behind ``--`` are overrides of the configuration.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import transformers
from machine import Watch, description
from whole_runs import ENVIRONMENT, LIMIT_S, parsed, torchrun

FFN = 32768
LOOK_S = 0.2
WEIGHTS = "model.safetensors"
# A short step; random weights have no logprobs that two programs agree on to four digits.
SMALL = (
    "batch.prompts_per_step=8",
    "batch.prompts_per_minibatch=8",
    "evaluation.num_prompts=8",
    "logging.tensorboard=false",
    "weight_sync.logprob_check_tolerance=1.0",
    "mismatch_limits.abort_above=null",
)
AS_RANK = "--as-rank"  # the first word of this program where it is a rank
COMPANIONS = ("*.jinja", "generation_config.json", "tokenizer*.json")
CLONE_NEWNS = 0x20000
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000
NAMES = {
    "start": "every rank starts from the model",
    "resume": "every rank resumes from the checkpoint",
    "each": "every rank reads the policy's weights for itself",
}


def write_model(model: Path, path: Path) -> None:
    """The model of ``model`` with wider layers and random weights."""
    config = transformers.AutoConfig.from_pretrained(model)
    config.intermediate_size = FFN
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    for pattern in COMPANIONS:
        for file in model.glob(pattern):
            shutil.copy(file, path)
    weights = sorted(file.name for file in path.glob("*.safetensors"))
    assert weights == [WEIGHTS], weights


class Pages:
    """Which pages of a file have been in memory since this was made; nothing of it is then."""

    def __init__(self, file: Path) -> None:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())  # pages that are not on the disk cannot be given up
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            # Private and writable: ctypes takes the address of no other. Nothing touches it.
            self._mapping = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        self._seen = np.zeros(-(-len(self._mapping) // mmap.PAGESIZE), dtype=np.uint8)
        self.look()
        assert self.num_bytes == 0, f"{file} stays in memory; give another folder (TMPDIR)"

    def look(self) -> None:
        """To be called often: the system gives pages up that nobody uses."""
        now = np.empty_like(self._seen)
        start = ctypes.c_char.from_buffer(self._mapping)
        mincore = ctypes.CDLL(None, use_errno=True).mincore
        _checked(
            mincore(
                ctypes.byref(start),
                ctypes.c_size_t(len(self._mapping)),
                now.ctypes.data_as(ctypes.c_void_p),
            )
        )
        self._seen |= now & 1

    @property
    def num_bytes(self) -> int:
        return int(self._seen.sum()) * mmap.PAGESIZE


def _checked(failed: int) -> None:
    if failed:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def mount_alone(copy: Path, name: Path) -> None:
    """For this process and those it starts ``name`` is ``copy``."""
    libc = ctypes.CDLL(None, use_errno=True)

    _checked(libc.unshare(CLONE_NEWNS))
    _checked(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))
    _checked(libc.mount(bytes(copy), bytes(name), None, MS_BIND, None))


def each_for_itself() -> None:
    """As it was before the weights of the policy were sent to the other ranks."""
    from megatron_rl.policy.state import weights

    weights._reads = lambda item, ranks: True
    weights._copy_to_others = lambda held, ranks: None


def rank_main(kind: str, folder: Path, words: Sequence[str]) -> None:
    """In the process of a rank."""
    mount_alone(folder / f"copy{os.environ['LOCAL_RANK']}", folder / "model")
    if kind == "each":
        each_for_itself()
    sys.argv = ["megatron_rl.train", *words]
    runpy.run_module("megatron_rl.train", run_name="__main__")


def launch(kind: str, nproc: int, folder: Path, words: Sequence[str]) -> list[int]:
    """Bytes of the weights that each rank has read."""
    copies = [Pages(folder / f"copy{rank}" / WEIGHTS) for rank in range(nproc)]
    *launcher, _, _ = torchrun(nproc)
    command = [sys.executable, "-m", *launcher, __file__, AS_RANK, kind, str(folder), *words]
    log = folder / f"{kind}.log"
    with log.open("w") as output:
        run = subprocess.Popen(command, env=ENVIRONMENT, stdout=output, stderr=output)
        try:
            end = time.monotonic() + LIMIT_S
            while run.poll() is None and time.monotonic() < end:
                for pages in copies:
                    pages.look()
                time.sleep(LOOK_S)
        finally:
            run.terminate()  # a torchrun ends its ranks
            run.wait()
    if run.returncode:
        sys.exit(f"{NAMES[kind]}: the run failed, or took {LIMIT_S} s\n{log.read_text()[-3000:]}")
    return [pages.num_bytes for pages in copies]


def row(kind: str, read: Sequence[int], size: int) -> str:
    by_rank = " / ".join(f"{each / 1e6:.1f}" for each in read)
    return f"| {NAMES[kind]} | {by_rank} | {sum(read) / size:.3f} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="folder of a toy model")
    parser.add_argument("--nproc", type=int, default=4)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parsed(parser)
    if os.geteuid() != 0:
        parser.error("mounts a model for each rank: run it as root")
    watch = Watch()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_model(options.model, folder / "copy0")
        for rank in range(1, options.nproc):
            shutil.copytree(folder / "copy0", folder / f"copy{rank}")
        (folder / "model").mkdir()
        size = (folder / "copy0" / WEIGHTS).stat().st_size
        common = [*options.overrides, *SMALL, f"model.path={folder / 'model'}"]
        rows = []
        for kind, steps, run in (("start", 1, "a"), ("resume", 2, "a"), ("each", 1, "b")):
            words = [*common, f"run_dir={folder / run}", f"trainer.num_steps={steps}"]
            read = launch(kind, options.nproc, folder, words)
            rows.append(row(kind, read, size))
            print(rows[-1], file=sys.stderr, flush=True)
    print(
        f"{description()}; {watch.load()}.\n{options.nproc} ranks, {size / 1e6:.1f} MB of weights"
    )
    print(f"\n| launch | MB read by rank | models in all |\n|---|---|---|\n{chr(10).join(rows)}")


if __name__ == "__main__":
    if sys.argv[1:2] == [AS_RANK]:
        rank_main(sys.argv[2], Path(sys.argv[3]), sys.argv[4:])
    else:
        main()
