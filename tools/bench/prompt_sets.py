"""Prompts of a launch: the package's prompt file beside the library ``datasets``, 2 ranks each.

    python tools/bench/prompt_sets.py --model TOY --rows 1000000 --folder DIR

Rows of {prompt, answer}, tokenized with the chat template. Each way is a launch of its own, twice:
first (nothing is kept) and again (found in the cache). ``datasets``: the first rank maps the rows
in batches into its Arrow cache, the others find it there; a prompt becomes the same ``Prompt``.
Seconds until all ranks have the prompts, imports left out; resident and private memory of a rank
after 20,000 prompts in random order; microseconds of such a prompt. --bad shows what each says of a
file whose row 734 has no answer and whose row 800 is no JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gpu_model import read_config, table
from machine import Watch, description, resident_bytes, restart_peak, spread
from transformers import AutoTokenizer

from megatron_rl.data.shared import shared_data
from megatron_rl.runtime import launch
from megatron_rl.types import Prompt

READS = 20_000


def write_rows(path: Path, count: int, *, bad: bool = False) -> None:
    draw = random.Random(0)
    with path.open("w", encoding="ascii") as file:
        for number in range(1, count + 1):
            first, second = draw.randrange(10**6), draw.randrange(10**6)
            row = {"prompt": f"{first} + {second} =", "answer": str(first + second)}
            if bad and number == 734:
                del row["answer"]
            file.write(json.dumps(row) + "\n")
            if bad and number == 799:
                file.write('{"prompt": "1 + 1 =", "answer: 2}\n')


def ours(options: argparse.Namespace, world: launch.World) -> object:
    config = read_config(
        options.model,
        f"data.train={options.file}",
        "data.eval=[]",
        "reward.verifier=exact",
        "rollout.max_prompt_tokens=64",
    )
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    return shared_data(config, world, tokenizer).train_prompts


class Mapped:
    def __init__(self, rows: object) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Prompt:
        row = self.rows[index]
        return Prompt(
            row["uid"], tuple(row["token_ids"]), row["answer"], "rows", {}, row["text"], ()
        )


def by_library(options: argparse.Namespace, world: launch.World) -> object:
    import datasets

    datasets.disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(options.model)

    def tokenized(rows: dict, numbers: list[int]) -> dict:
        texts = tokenizer.apply_chat_template(
            [[{"role": "user", "content": text}] for text in rows["prompt"]],
            tokenize=False,
            add_generation_prompt=True,
        )
        ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
        uids = [f"rows:{number + 1}" for number in numbers]
        return {"uid": uids, "token_ids": ids, "answer": rows["answer"], "text": texts}

    def read() -> object:
        rows = datasets.load_dataset(
            "json", data_files=str(options.file), split="train", cache_dir=str(options.cache)
        )
        rows = rows.map(
            tokenized,
            batched=True,
            with_indices=True,
            remove_columns=["prompt"],
            new_fingerprint=f"prompts{options.rows}",
        )
        assert max(map(len, rows.select(range(1000))["token_ids"])) <= 64
        return rows

    if world.rank == 0:
        read()
    world.barrier()
    return Mapped(read())


def one_rank(options: argparse.Namespace) -> None:
    world = launch.start()
    if options.way == "datasets":
        import datasets  # noqa: F401
    before = resident_bytes("VmRSS")
    restart_peak()
    world.barrier()
    start = time.perf_counter()
    try:
        prompts = (ours if options.way == "ours" else by_library)(options, world)
    except Exception as error:  # noqa: BLE001
        if world.is_main:
            print("REFUSED", f"{type(error).__name__}: {error}"[:600], flush=True)
        launch.exit_process(1)
    world.barrier()
    seconds = time.perf_counter() - start
    peak = resident_bytes("VmHWM") - before
    draw = random.Random(world.rank)
    places = [draw.randrange(len(prompts)) for _ in range(READS)]
    start = time.perf_counter()
    total = 0
    for place in places:
        total += len(prompts[place].token_ids)
    each = (time.perf_counter() - start) / READS
    assert prompts[41].uid.endswith(":42"), prompts[41].uid
    text = Path("/proc/self/smaps_rollup").read_text()
    private = sum(int(line.split()[1]) for line in text.splitlines() if line[:8] == "Private_")
    rows = world.all_gather((seconds, peak, resident_bytes("VmRSS") - before, private * 1024, each))
    if world.is_main:
        print("ROW", json.dumps([len(prompts), total, rows]), flush=True)
    launch.exit_process(0)


def launched(options: argparse.Namespace, way: str, file: Path) -> list | str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", __file__, "--way", way, "--file", str(file)]
    command += ["--model", str(options.model), "--folder", str(options.folder)]
    temp = options.folder / "temp"
    temp.mkdir(exist_ok=True, parents=True)
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "TMPDIR": str(temp)}
    )
    for line in done.stdout.splitlines():
        if line.startswith("ROW "):
            return json.loads(line[4:])
        if line.startswith("REFUSED "):
            return line[8:]
    sys.exit(done.stdout[-2000:] + done.stderr[-4000:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--bad", action="store_true")
    parser.add_argument("--way")
    parser.add_argument("--file", type=Path)
    options = parser.parse_args()
    options.cache = options.folder / "cache"
    if options.way:
        one_rank(options)
    options.folder.mkdir(parents=True, exist_ok=True)
    file = options.folder / "rows.jsonl"
    if options.bad:
        write_rows(file, 1000, bad=True)
        for way in ("ours", "datasets"):
            print(f"{way}: {launched(options, way, file)}\n")
        return
    watch = Watch()
    write_rows(file, options.rows)
    taken: dict[tuple[str, str], list] = {}
    for turn in range(options.turns):
        for way in ("ours", "datasets")[:: 1 - 2 * (turn % 2)]:
            shutil.rmtree(options.folder / "temp", ignore_errors=True)
            shutil.rmtree(options.cache, ignore_errors=True)
            for start in ("first", "again"):
                taken.setdefault((way, start), []).append(launched(options, way, file))
                print(way, start, taken[way, start][-1], flush=True)
    rows = []
    for (way, start), results in taken.items():
        worst = [[max(column) for column in zip(*result[2], strict=True)] for result in results]
        mib = [[one[number] / 2**20 for one in worst] for number in (1, 2, 3)]
        rows.append(
            {
                "way": way,
                "start": start,
                "s": spread([one[0] for one in worst]).text(1),
                "MiB at the most": spread(mib[0]).text(0),
                "MiB then": spread(mib[1]).text(0),
                "private MiB of the rank": spread(mib[2]).text(0),
                "us a prompt": spread([one[4] * 1e6 for one in worst]).text(0),
            }
        )
    print(f"{description()}; {watch.load()}\n{options.rows} rows\n\n{table(rows)}")


if __name__ == "__main__":
    main()
