"""The commands of the documents run as they are printed: placeholders become small real files,
small sizes are appended.
A command that is neither run here nor listed in ``NOT_RUN`` with the reason fails, and so does an
entry that no document prints.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from tests import warm
from tests.distributed.big_models import CONFIGS
from tests.documents import Command, commands, of_docstring, of_markdown
from tests.e2e.toy import LETTERS, write_model
from tests.launch import end, run
from tests.numerics.server import free_port, shared_memory, wait_for, with_entry_point
from tests.test_size import REPO
from tools.convert_checkpoint import to_megatron


@dataclass(frozen=True)
class Run:
    """How a command is run: ``more`` is appended, ``instead`` replaces text before the common
    substitutions do, ``before`` are commands that it needs."""

    more: str = ""
    instead: dict[str, str] = field(default_factory=dict)
    shows: str = ""
    code: int = 0
    limit_s: int = 280
    before: tuple[str | dict[str, str], ...] = ()


def worded(value: Any) -> Any:
    """With the words that a ``{NAME}`` of the table stands for."""
    if isinstance(value, str):
        for name, words in TABLE["words"].items():
            value = value.replace(f"{{{name}}}", words)
        return value
    if isinstance(value, dict):
        return {key: worded(each) for key, each in value.items()}
    return tuple(map(worded, value)) if isinstance(value, list) else value


def runs(group: str) -> dict[str, Run]:
    return {row["run"]: run_of(row) for row in TABLE[group]}


def run_of(row: dict[str, Any]) -> Run:
    return Run(**{key: worded(value) for key, value in row.items() if key != "run"})


TABLE = yaml.safe_load((REPO / "tests" / "commands.yaml").read_text(encoding="utf-8"))
QUICK, LONG = runs("quick"), runs("long")
NOT_RUN = {command: row["why"] for row in TABLE["not_run"] for command in row["commands"]}
MAKER = "torchrun --standalone --nproc-per-node 2 tools/make_toy_model.py --out DIR"
SERVER, PUSH = TABLE["beside"]


def needed(row: str | dict[str, str]) -> tuple[str, Run]:
    """A command that stands before another, with its own words where it has some."""
    if isinstance(row, dict):
        return row["run"], run_of(row)
    return row, LONG.get(row, Run())


def short(text: str) -> str:
    """A name for a test."""
    return re.sub(r"[^\w.=-]+", " ", text)[:70]


def unique() -> dict[str, Command]:
    return {command.text: command for command in commands()}


def known() -> list[str]:
    return [*QUICK, *LONG, *NOT_RUN, *TABLE["beside"], *TABLE["steps"]]


def test_every_command_is_run_or_listed():
    printed = unique()
    missing = [
        f"{command.where}: {text}" for text, command in printed.items() if text not in known()
    ]
    assert not missing, "neither run nor in NOT_RUN:\n" + "\n".join(missing)
    stale = [text for text in known() if text not in printed]
    assert not stale, "no document prints:\n" + "\n".join(stale)
    assert len(known()) == len(set(known())), "a command is listed twice"


def test_reasons_name_files_that_exist():
    named = [
        word
        for reason in NOT_RUN.values()
        for word in re.findall(r"(?:tests/\S+\.py|\.ci/run)", reason)
    ]
    assert len(named) > 10
    assert [word for word in named if not (REPO / word).is_file()] == []


def test_the_parser_finds_what_a_reader_would_type():
    page = (
        "```bash\n# say\nA=1 python x.py --a 'b # c' \\\n    --d  # why\n```\n```\na -> b\npytest"
        " -m gpu x\n```\n```python\nf()\n```\n"
    )
    assert of_markdown(page) == ["A=1 python x.py --a 'b # c' --d", "pytest -m gpu x"]
    source = (
        '"""T.\n\n    python x.py DIR [--a N] [--b C ...]     explains\n    text python x.py\n"""\n'
    )
    assert of_docstring(source) == ["python x.py DIR"]


@pytest.fixture(scope="session")
def place(tmp_path_factory) -> Path:
    """A folder with everything that the commands of the core tier read, and a view of the
    repository to run them in."""
    folder = tmp_path_factory.mktemp("commands")
    view = folder / "repository"
    view.mkdir()
    for entry in REPO.iterdir():
        if entry.name not in (".git", ".venv", ".work", "runs"):
            (view / entry.name).symlink_to(entry)
    write_model(folder / "letters")
    rows = [
        {"prompt": letter, "answer": letter, "data_source": "letters", "extra": {"n": 1}}
        | {"response": letter}
        for letter in LETTERS
    ]
    (folder / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    labels = {"metadata": {"task": "spelling", "skills": ["reading"]}}
    rows = [{"query": "a", "choices": ["a", "b"], "answer": "a"} | labels] * 2
    pq.write_table(pa.Table.from_pylist(rows), folder / "testmini.parquet")
    CONFIGS["7b"].save_pretrained(folder / "qwen")
    to_megatron(folder / "letters", folder / "checkpoint")
    return folder


@pytest.fixture(scope="session")
def full_place(place) -> Path:
    """With what the long commands read, too: the toy model, an environment that is set up, an
    encoder and an image."""
    from tests.unit.data.test_visual_entropy import encoder_folder, images

    view = place / "repository"
    (view / ".venv").mkdir()
    for entry in Path(sys.prefix).iterdir():
        if entry.name != ".setup_cpu":
            (view / ".venv" / entry.name).symlink_to(entry)
    # As tools/setup_cpu.sh leaves it; the set-up itself is the business of .ci/run.
    key = "python3 --version; pwd; cat setup.py tools/setup_cpu.sh tools/constraints_cpu.txt"
    content = subprocess.run(
        ["bash", "-c", key], cwd=view, env=environment(place), stdout=subprocess.PIPE, check=True
    ).stdout
    (view / ".venv" / ".setup_cpu").write_text(
        f"{hashlib.sha256(content).hexdigest()}\ncpu,vision\n"
    )
    encoder_folder("clip", place / "encoder")
    images(place)[1].rename(place / "image.png")
    row = {"prompt": "a", "answer": "a", "images": ["image.png"]}
    (place / "images.jsonl").write_text(json.dumps(row) + "\n")
    start(place, MAKER, LONG[MAKER])
    (place / "toy").symlink_to(place / "new" / "model")
    (view / ".work").mkdir()
    linked(place, f"toy_model-{digest_of(['make_toy_model'])}", place / "toy")
    make_vision(place)
    make_tools(place)
    return place


def make_vision(place: Path) -> None:
    """Tasks and toy model of examples/vision_cpu, fewer and less trained than by its run.sh."""
    python = f"{place}/repository/.venv/bin/python tools"
    folder = place / "vision"
    model = f"{python}/make_toy_vision_model.py --tasks {folder}/tasks --out {folder}/model"
    for text in (
        f"{python}/make_vision_tasks.py --train 64 --eval 8 --out {folder}/tasks",
        f"{model} --steps 2",
    ):
        start(place, text, Run())
    names = ("make_vision_tasks", "make_toy_vision_model", "make_toy_model")
    linked(place, f"toy_vision-{digest_of(names)}", folder)


def make_tools(place: Path) -> None:
    """Toy models of examples/tools_cpu and game_cpu, less trained than by their run.sh."""
    makers = {
        "toy_tools_model": ("make_toy_tools_model", "make_toy_model"),
        "toy_game_model": (
            *("make_toy_game_model", "make_toy_model", "make_toy_tools_model"),
            "../examples/game_cpu/game",
        ),
    }
    for (name, files), folder in zip(makers.items(), ("calling", "guessing"), strict=True):
        maker = f"{place}/repository/.venv/bin/python tools/{files[0]}.py"
        start(place, f"{maker} --out {place}/{folder} --steps 2", Run())
        linked(place, f"{name}-{digest_of(files)}", place / folder)


def digest_of(names: Sequence[str]) -> str:
    """As in the name of a model that a toy.sh keeps: of its makers."""
    makers = b"".join((REPO / f"tools/{name}.py").read_bytes() for name in names)
    return hashlib.sha256(makers).hexdigest()[:12]


def linked(place: Path, name: str, folder: Path) -> None:
    (place / "repository/.work" / name).symlink_to(folder)


def environment(place: Path) -> dict[str, str]:
    """Of a user who activated the environment, on a machine where other launches may hold
    torchrun's port."""
    first = place / "repository" / ".venv" / "bin"
    programs = first if first.is_dir() else Path(sys.executable).parent
    path = f"{programs}:{os.environ['PATH']}"
    return {
        **os.environ,
        "PATH": path,
        "PYTHONPATH": str(REPO),
        "PET_STANDALONE": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }


def filled_in(place: Path, new: Path, text: str, settings: Run) -> str:
    """The command with real files, and with the words that make it small."""
    for name, value in settings.instead.items():
        assert name in text, f"nothing to replace: {name!r} in {text}"
        text = text.replace(name, value)
    text = f"{text} {settings.more}"
    for name, value in TABLE["substitutions"].items():
        text = re.sub(rf"(?<![\w./{{}}-]){re.escape(name)}(?![\w/-])", value, text)
    return text.replace("{place}", str(place)).replace("{new}", str(new))


def start(
    place: Path, text: str, settings: Run, new: Path | None = None, *, is_warm: bool = False
) -> str:
    """Runs the command in the view of the repository, as a shell reads it; returns what it
    printed. With ``is_warm``, its ``python`` has imported the libraries (tests/warm)."""
    new = place / "new" if new is None else new
    new.mkdir(exist_ok=True)
    command = filled_in(place, new, text, settings)
    limit_s = settings.limit_s
    env = environment(place)
    if is_warm:
        env["PATH"] = f"{warm.python().parent}:{env['PATH']}"
    done = run(
        ["bash", "-c", command],
        limit_s,
        env=env,
        cwd=place / "repository",
        check=False,
    )
    assert done.returncode == settings.code, f"{command}\n{done.stdout[-4000:]}"
    assert re.search(settings.shows, done.stdout), f"{command}\n{done.stdout[-4000:]}"
    assert "Traceback" not in done.stdout, f"{command}\n{done.stdout[-4000:]}"
    return done.stdout


@pytest.mark.parametrize("text", QUICK, ids=short)
def test_quick_command(place, tmp_path, text):
    start(place, text, QUICK[text], tmp_path, is_warm=True)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("text", [text for text in LONG if text != MAKER], ids=short)
def test_long_command(request, tmp_path, text):
    """``MAKER`` runs in the set-up: the others take the model that it makes."""
    before = [needed(row) for row in LONG[text].before]
    first = [command for command, _ in before]
    wants_more = re.search(
        r"\b(TOY|ENCODER|TASKS)\b|run\.sh", " ".join([text, LONG[text].more, *first])
    )
    place = request.getfixturevalue("full_place" if wants_more else "place")
    for command, settings in before:
        start(place, command, settings, tmp_path)
    start(place, text, LONG[text], tmp_path)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_server_and_the_push(place, tmp_path):
    with server(place, tmp_path) as url:
        said = start(
            place,
            PUSH,
            Run(instead={"http://127.0.0.1:8000": url}, shows=r"\d+ bytes, the least possible, in"),
            tmp_path,
        )
    assert "Traceback" not in said


@contextlib.contextmanager
def server(place: Path, folder: Path) -> Iterator[str]:
    """The server as printed, but at a free port; nothing of it is left afterwards."""
    port, log = free_port(), folder / "server.log"
    command = filled_in(place, folder, SERVER, Run(f"--port {port}"))
    search = {**environment(place), **with_entry_point(folder)}
    with log.open("w") as output:
        process = subprocess.Popen(
            ["bash", "-c", f"exec env {command}"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=search,
            cwd=place / "repository",
            start_new_session=True,
        )
        mapped: set[Path] = set()
        try:
            from megatron_rl.weight_sync.fleet.commands import HttpServer

            wait_for(process, HttpServer(f"http://127.0.0.1:{port}"), log)
            mapped = shared_memory(process.pid)
            yield f"http://127.0.0.1:{port}"
        finally:
            mapped |= shared_memory(process.pid)
            end(process)
            for segment in mapped:
                segment.unlink(missing_ok=True)
