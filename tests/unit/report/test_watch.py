"""python tools/watch.py: what it shows of real run folders, and when it ends."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import pytest
from rich.console import Console

from tests.unit.trainer.runs import build_bandit
from tools import watch
from tools.watch import curve, look

# Holds the folder that it is given until its input ends.
HOLDER = """
import sys
from pathlib import Path
from subprocess import PIPE
from megatron_rl.runtime.guard import lock
lock.hold(Path(sys.argv[1]), "launch-7")
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    build_bandit(folder, "seed=3").run()
    return folder / "run"


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


def text_of(run: Path) -> tuple[str, bool]:
    shown, is_over = look(run)
    console = Console(file=io.StringIO(), width=120)
    console.print(shown)
    return console.file.getvalue(), is_over


def line_of(text: str, begin: str) -> list[str]:
    (line,) = (line for line in text.splitlines() if line.strip().startswith(begin))
    return line.strip().removeprefix(begin).split()


def test_a_finished_run_is_shown_once_with_its_numbers_and_newest_sample(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert watch.main([str(run)]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[0].startswith("run  grpo  step 3/3") and "/3  finished\n" in text
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    first, last, drawn = line_of(text, "training reward")
    assert (first, last) == (f"{rewards[0]:.3f}", f"{rewards[-1]:.3f}")
    assert drawn == curve(rewards, 40)
    assert line_of(text, "entropy")[0] == "[nats]"
    sample = json.loads((run / "samples.jsonl").read_text().splitlines()[-1])
    assert f"step {sample['step']}, reward {sample['reward']}: " in text


def test_states_other_than_the_end(run: Path) -> None:
    os.truncate(run / "metrics.jsonl", (run / "metrics.jsonl").read_bytes().rindex(b'{"step": 3'))
    text, is_over = text_of(run)
    assert "no process is seen to hold the folder, last row " in text and not is_over
    (run / "failed_host").write_text("node7\n")
    assert "/3  failed, last row " in text_of(run)[0] and text_of(run)[1]
    (run / "requeue").write_text("2\n")
    assert "stopped on request: start it again" in text_of(run)[0] and text_of(run)[1]


def test_a_live_run_is_seen_from_another_process(run: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    new.mkdir()
    with pytest.raises(ValueError, match=r"new: no run has begun here; give the run_dir"):
        look(new)
    for folder, state in (
        (new, "new: starting (host "),
        (run, "/3 running, about 0 s left, last row "),
    ):
        words = [sys.executable, "-c", HOLDER, str(folder)]
        with subprocess.Popen(words, stdin=PIPE, stdout=PIPE, text=True) as other:
            assert other.stdout is not None and other.stdout.readline() == "held\n"
            text, is_over = text_of(folder)
            other.communicate()
        text = " ".join(text.split())  # lines are cut where a name is long
        assert state in text and "launch launch-7" in text and not is_over


def test_what_a_response_holds_moves_no_cursor_and_is_no_markup(run: Path) -> None:
    row = {"step": 3, "prompt_text": "[bold]2+2[/bold]", "response": "\x1b[2J4\r", "reward": 1.0}
    with (run / "samples.jsonl").open("a") as file:
        file.write(json.dumps(row | {"correct": True}) + '\n{"step": 4, "resp')
    text, _ = text_of(run)
    assert text.endswith("step 3, reward 1.0: \n[bold]2+2[/bold]\n[2J4\n")


def test_a_terminal_is_redrawn_until_the_run_has_ended(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = (run / "metrics.jsonl").read_bytes()
    os.truncate(run / "metrics.jsonl", whole.rindex(b'{"step": 3'))
    waits = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        (run / "metrics.jsonl").write_bytes(whole)

    monkeypatch.setattr(watch.time, "sleep", sleep)
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    watch.watch(run, 0.5, console)
    shown = console.file.getvalue()
    assert len(waits) == 1 and waits[0] >= 0.5
    assert shown.index("no process is seen") < shown.rindex("finished")


def test_curves_by_hand() -> None:
    assert curve([0.0, 1.0, 2.0, 7.0], 2) == "\u2581\u2588"  # the means 0.5 and 4.5
    assert curve([0.0, 7.0, 3.5], 8) == "\u2581\u2588\u2585"  # 3.5 of 7 is rounded to even, the 4th
    assert curve([2.0, 2.0], 8) == "\u2581\u2581"
    assert curve([*[0.0] * 50, *[1.0] * 50], 40) == 20 * "\u2581" + 20 * "\u2588"
