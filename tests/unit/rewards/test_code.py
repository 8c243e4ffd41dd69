"""Programs in the sandbox: what passes, what fails, and what a hostile one cannot do."""

from __future__ import annotations

import os
import shutil
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from megatron_rl.rewards import code
from megatron_rl.rewards.base import Options, Task
from megatron_rl.rewards.build import build_reward
from megatron_rl.rewards.code import CodeVerifier, program, read_tests
from megatron_rl.rewards.sandbox import refusal
from tests.unit.rewards.cases import config, prompt

NO_BWRAP = "bwrap is not installed or user namespaces are off" if refusal("bubblewrap") else None
needs_bwrap = pytest.mark.skipif(NO_BWRAP is not None, reason=str(NO_BWRAP))
KINDS = [pytest.param("bubblewrap", marks=needs_bwrap), "rlimits_only"]
ADD = Task(
    "a", "assert add(2, 3) == 5\nassert add('a', 'b') == 'ab'\nassert 1 < add(1, 1) < 3", "x"
)
GOOD = "def add(a, b): return a + b\n"


def accuracy(
    kind: str,
    source: str,
    task: Task = ADD,
    *,
    partial: bool = False,
    timeout_s: float = 5.0,
    memory: int = 256 << 20,
) -> float:
    options = Options(partial, timeout_s, memory, kind)
    verdict = CodeVerifier(options).verify(task, f"Here it is:\n```python\n{source}\n```\n")
    assert verdict.problem is None
    return verdict.accuracy


@pytest.mark.parametrize(
    ("answer", "source"),
    [
        ("a\n```python\n1\n```\nb\n```py\n2\n```\nc", "2"),
        ("```\n3\n```", "3"),
        ("4", "4"),
        ("```python\n5\n", "```python\n5\n"),
        ("```bash\nls\n```", "```bash\nls\n```"),
        ("```python\n6\n```\n```bash\nls\n```", "6"),
        ("``` Python \n7\n```", "7"),
    ],
)
def test_the_program_is_the_last_block_of_python(answer, source):
    assert program(answer) == source


@pytest.fixture
def starts(monkeypatch):
    """Grows by one with every start of a program."""
    starts = []

    class Counted(code.Sandbox):
        def __enter__(self):
            starts.append(1)
            return super().__enter__()

    monkeypatch.setattr(code, "Sandbox", Counted)
    return starts


def test_a_program_that_fails_by_itself_is_started_once(starts):
    task = Task("a", "assert f() == 1\nassert f() == 2", "x")
    assert accuracy("rlimits_only", "raise ValueError", task, partial=True) == 0
    assert len(starts) == 1


def test_a_set_up_that_fails_at_the_second_start_is_not_tried_until_time_is_up(starts):
    """The set-up needs what a test did, and a new start leaves out the tests before."""
    tests = "x = []\nassert x.append(1) is None\ny = x[0]\nassert f() == 1\nassert f() == 2"
    task = Task("a", tests, "x")
    source = "def f(): return 2"
    assert accuracy("rlimits_only", source, task, partial=True) == pytest.approx(1 / 3)
    assert len(starts) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_asserts_pass_or_fail(kind):
    assert accuracy(kind, GOOD) == 1
    assert accuracy(kind, "def add(a, b): return 5") == 0
    assert accuracy(kind, "def add(a, b): return 5", partial=True) == pytest.approx(1 / 3)
    assert accuracy(kind, "def add(a, b: return") == 0
    assert accuracy(kind, "import collections, math, json, dataclasses\n" + GOOD) == 1
    human_eval = Task(
        "a",
        "import math\ndef check(f):\n    assert math.isclose(f(0.1, 0.2), 0.3)\ncheck(add)",
        "x",
    )
    assert accuracy(kind, GOOD, human_eval) == 1
    assert accuracy(kind, "def add(a, b): return 5", human_eval) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_compared_by_their_own_types_only(kind):
    task = Task("a", "assert f() == {'a': [1, 2.5, (True, None)], 'b': {1, 2}}", "x")
    assert accuracy(kind, "def f(): return {'a': [1, 2.5, (True, None)], 'b': {2, 1}}", task) == 1
    counted = (
        "from collections import *\nP = namedtuple('P', 'x y')\ndef f(): return OrderedDict(b={1,"
        " 2}, a=[1, 2.5, P(True, None)])"
    )
    assert accuracy(kind, counted, task) == 1
    shows = "def __repr__(s): return \"{'a': [1, 2.5, (True, None)], 'b': {1, 2}}\""
    everything = f"class E(list):\n  def __eq__(s, o): return True\n  {shows}\n"
    assert accuracy(kind, everything + "def f(): return E()", task) == 0
    assert accuracy(kind, everything.replace("(list)", "") + "def f(): return E()", task) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_scripts_are_judged_by_what_they_print(kind):
    task = Task(
        "a", '[{"input": "2 3\\n", "output": "5\\n"}, {"input": "1 1", "output": "2"}]', "x"
    )
    assert accuracy(kind, "a, b = map(int, input().split())\nprint(a + b, ' ')", task) == 1
    assert accuracy(kind, "input()\nprint(5)", task, partial=True) == 0.5
    assert accuracy(kind, "print(5)\n1 / 0", task) == 0
    as_main = "if __name__ == '__main__':\n  print(sum(map(int, input().split())))"
    assert accuracy(kind, as_main, task) == 1
    large = Task("a", "", "x", {"tests": [{"input": "7 " * 100_000, "output": "700000"}]})
    assert accuracy(kind, "print(sum(map(int, input().split())))", large) == 1


# Each of these must fail all tests, whatever it does.
CHEATS = {
    "os._exit": "import os\nos._exit(0)",
    "sys.exit": "import sys\nsys.exit(0)",
    "prints": "print('{\"done\": true}')\nprint('passed')\nimport os\nos._exit(0)",
    "answers without the number": (
        'import os\nfor fd in range(3, 64):\n  try: os.write(fd, b\'{"nonce": "", "done":'
        " true}\\n' * 9)\n  except OSError: pass"
    ),
    "equals everything": (
        "class E:\n  def __eq__(s, o): return True\n  def __bool__(s): return False\ndef add(a, b):"
        " return E()"
    ),
    "raises nothing": (
        "import sys\nsys.excepthook = lambda *a: None\ndef add(a, b): raise SystemExit(0)"
    ),
    "atexit": "import atexit, os\natexit.register(os._exit, 0)\ndef add(a, b): return 0",
    "endless": "while True: pass",
    "sleeps": "import time\ntime.sleep(100)",
    "forks": "import os\nwhile True: os.fork()",
    "memory": "x = bytearray(2 << 30)\n" + GOOD,
    "prints a lot": "import os\nwhile True: os.write(1, b'x' * 65536)",
    "returns a lot": "def add(a, b): return 'x' * (1 << 26)",
    "recursion": "def add(a, b): return add(a, b)",
    "leaves its group": "import os\nos.setsid()\n" + GOOD,
    "another program": "import os\nos.execv('/bin/true', ['true'])",
    "a process": "import subprocess\nsubprocess.run(['true'])\n" + GOOD,
    "large file": (
        "import os\nf = os.open('big', os.O_CREAT | os.O_WRONLY)\nfor _ in range(64): os.write(f,"
        " b'x' * (1 << 20))\n" + GOOD
    ),
    "nothing": "",
    "NUL": "\x00",
    "a thousand brackets": "(" * 1000,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CHEATS)
def test_no_cheat_passes_a_test(kind, name):
    before = set(psutil.Process().children())
    began = time.monotonic()
    assert accuracy(kind, CHEATS[name], partial=True, timeout_s=1.5) == 0
    assert time.monotonic() - began < 60
    assert set(psutil.Process().children()) <= before


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_of_no_harm_is_allowed(kind):
    thread = "import threading\nt = threading.Thread(target=print)\nt.start()\nt.join()\n"
    loop = "import asyncio\nasync def one(): return 1\nassert asyncio.run(one()) == 1\n"
    file = "open('note.txt', 'w').write('x')\nassert open('note.txt').read() == 'x'\n"
    assert accuracy(kind, thread + loop + file + GOOD) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_the_rest_of_the_machine_is_out_of_reach(kind, monkeypatch):
    """The program passes when all it tries is refused."""
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        tries = f"""
import os, signal, socket
refused = 0
for target in ({os.getpid()}, os.getppid(), 1, -1):
    try:
        os.kill(target, signal.SIGKILL)
    except OSError:
        refused += 1
try:
    socket.create_connection(("127.0.0.1", {listener.getsockname()[1]}), 1)
except OSError:
    refused += 1
import resource
for target in (os.getppid(), {os.getpid()}):
    try:
        resource.prlimit(target, resource.RLIMIT_CPU, (0, 0))
    except OSError:
        refused += 1
def add(a, b):
    assert refused == 7 and "secret" not in str(os.environ)
    return a + b
"""
        assert accuracy(kind, tries) == 1


@needs_bwrap
def test_files_of_this_machine_are_neither_read_nor_written(tmp_path):
    """What rlimits_only does not promise."""
    note = tmp_path / "note"
    note.write_text("mine")
    tries = f"""
import os
refused = 0
for path, how in (({str(note)!r}, "r"), ({str(note)!r}, "w"),
                  ("/etc/passwd", "r"), ("/usr/lib/x", "w"), (os.__file__, "a"),
                  ("/proc/1/environ", "w"), ({os.path.abspath(__file__)!r}, "r")):
    try:
        open(path, how)
    except OSError:
        refused += 1
def add(a, b):
    assert refused == 7, refused
    return a + b
"""
    assert accuracy("bubblewrap", tries) == 1
    assert note.read_text() == "mine"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("def f(:", "are not Python"),
        ("x = 1", "has no tests"),
        ('[{"input": "1"}]', "lacks the text of input or output"),
    ],
)
def test_tests_that_cannot_be_run_are_refused_at_the_start(answer, message):
    reward = build_reward(config(verifier="code"))
    with pytest.raises(ValueError, match=rf"toy:1: .*{message}"):
        reward.check([prompt(answer)])
    first, _ = read_tests(Task("a", "", "x", {"tests": ["assert f(1) == 2", "assert f(2)"]}))
    assert first.expression == "f(1)"


def test_without_bubblewrap_the_remedy_is_named(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name, **_: None)
    refusal.cache_clear()
    reward = build_reward(config(verifier="code", sandbox="bubblewrap"))
    remedy = r"bwrap is not installed; install it \(apt-get install bubblewrap\).*rlimits_only"
    try:
        with pytest.raises(ValueError, match=remedy):
            reward.check([prompt("assert f() == 1")])
    finally:
        refusal.cache_clear()


def test_programs_are_judged_in_workers_and_from_any_thread():
    reward = build_reward(config(verifier="code", timeout_s=3.0, memory_gib=0.25))
    tasks = [prompt("assert add(2, 3) == 5")] * 3
    reward.check(tasks)
    programs = [GOOD, "while True: pass", CHEATS["forks"]]
    with ThreadPoolExecutor() as threads:
        found = threads.submit(reward.score, tasks, programs, [False] * 3).result()
    assert [score.reward for score in found] == [1, 0, 0]
    assert not reward.problems
    reward.close()
