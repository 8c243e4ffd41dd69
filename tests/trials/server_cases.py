"""Weights pushed into a vLLM server, as the example's README says."""

from __future__ import annotations

import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable

from tests.launch import REPO, end
from tests.numerics.server import shared_memory
from tests.trials.makers import CODES, tool
from tests.trials.material import write_model
from tests.trials.place import Case, Place, end_all, marked_processes
from tests.trials.verdicts import Ends, Outcome, Refused


def readme_server() -> tuple[list[str], dict[str, str]]:
    """The words and the variables of the first command of examples/vllm_server/README.md."""
    import shlex

    text = (REPO / "examples" / "vllm_server" / "README.md").read_text()
    block = text.split("```bash\n", 1)[1].split("```", 1)[0].replace("\\\n", " ")
    words = shlex.split(block.splitlines()[0])
    variables = {}
    while "=" in words[0]:
        key, _, value = words.pop(0).partition("=")
        variables[key] = value
    return words, variables


def served(place: Place) -> Outcome:
    """The two commands of the README: a server of one model takes another one's weights."""
    model = place.material.made("served", lambda path: write_model(path, "qwen2", seed=1))
    words, variables = readme_server()
    words = [sys.executable, *(str(model) if word == "MODEL" else word for word in words[1:])]
    port = free_port()
    running = place.start([*words, "--host", "127.0.0.1", "--port", str(port)], env=variables)
    address = f"http://127.0.0.1:{port}"
    try:
        running.wait_for(lambda: answers(f"{address}/health"), 150)
        pusher = Place(place.folder, place.material, 90)
        push = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        push += [str(REPO / "examples" / "vllm_server" / "push.py"), "--server", address]
        push += ["--model", str(place.material.model("qwen2")), "--tensor", "2", "--version", "1"]
        return pusher.start(push, log="push.txt").finish(90)
    except TimeoutError as error:
        seconds = time.monotonic() - running.started
        return Outcome(1, running.text()[-3000:], seconds).noting([str(error)[:200]])
    finally:
        mapped = shared_memory(running.process.pid)
        end(running.process)
        end_all(lambda pid: pid in marked_processes(place.mark))
        for segment in mapped:
            segment.unlink(missing_ok=True)  # a stock server that is stopped leaves its own


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=2) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def pushing(*words: str) -> Callable[[Place], list[object]]:
    """push.py to a server that is not there."""
    push = REPO / "examples" / "vllm_server" / "push.py"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", push]
    server = ["--server", "http://127.0.0.1:9", "--tensor", "2", "--version", "1"]
    return lambda place: [*launcher, *server, "--model", place.material.model("qwen2"), *words]


def cases() -> list[Case]:
    return [
        Case(
            "jrn_server",
            "journeys",
            "a vLLM server takes weights, as its README says",
            served,
            (Ends(),),
            "command",
            240,
        ),
        tool(
            "jrn_server_away",
            "a server that is not there",
            pushing(),
            Refused(("127.0.0.1:9", "server|reach|connect"), before="", codes=CODES),
        ),
        tool(
            "jrn_push_model",
            "a model that is not there",
            lambda place: [*pushing()(place), "--model", "/nowhere"],
            Refused(("/nowhere",), before="", codes=CODES),
        ),
    ]
