"""A stock vLLM server of a model on disk, in processes of its own, and what it answers."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from megatron_rl.types import Completion, Prompt
from megatron_rl.weight_sync.fleet.commands import HttpServer
from tests.launch import REPO, TAIL_LINES, end

STARTS_WITHIN_S = 200


@contextlib.contextmanager
def serving(model: Path, tensor: int, folder: Path, has_text: bool = False) -> Iterator[str]:
    """The address of a server that answers. Every process of it is dead afterwards.

    Args:
        has_text: it takes texts and images, not token ids alone.
    """
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    log = folder / "server.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            command(model, tensor, port, has_text),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment(folder),
            start_new_session=True,
        )
        mapped: set[Path] = set()
        try:
            wait_for(process, HttpServer(address), log)
            mapped = shared_memory(process.pid)
            yield address
        finally:
            mapped |= shared_memory(process.pid)
            end(process)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # engines outlive a server that died
            for segment in mapped:
                segment.unlink(missing_ok=True)  # workers that are killed leave theirs


def command(model: Path, tensor: int, port: int, has_text: bool = False) -> list[str]:
    """The server's command line: float32, and the weight transfer of this package."""
    options = {
        "--model": model,
        "--host": "127.0.0.1",
        "--port": port,
        "--tensor-parallel-size": tensor,
        "--weight-transfer-config": '{"backend": "megatron_rl"}',
        "--dtype": "float32",
        "--max-model-len": 256 if has_text else 512,
        "--kv-cache-memory-bytes": 2**25,
        "--logprobs-mode": "processed_logprobs",
        "--generation-config": "vllm",
    }
    words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    for option, value in options.items():
        words += [option, str(value)]
    if not has_text:
        words.append("--skip-tokenizer-init")
    return [*words, "--enforce-eager", "--enable-scale-out"]


def environment(folder: Path) -> dict[str, str]:
    return {
        **os.environ,
        **with_entry_point(folder),
        "VLLM_SERVER_DEV_MODE": "1",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # two workers may share a socket
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def with_entry_point(folder: Path) -> dict[str, str]:
    """The variables by which vLLM finds the plug-in of setup.py.

    Whatever was declared when the package was installed does not count.
    """
    words = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", folder]
    subprocess.run(words, cwd=REPO, check=True, capture_output=True)
    folders = [str(folder), str(REPO), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(folders)}


def shared_memory(pid: int) -> set[Path]:
    """The named segments that the process and its descendants have mapped."""
    if not psutil.pid_exists(pid):
        return set()
    tree = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    segments = set()
    for process in tree:
        with contextlib.suppress(psutil.Error):
            paths = [area.path for area in process.memory_maps()]
            segments |= {Path(path) for path in paths if path.startswith("/dev/shm/")}
    return segments


def wait_for(process: subprocess.Popen, server: HttpServer, log: Path) -> None:
    for _ in range(STARTS_WITHIN_S):
        if process.poll() is not None:
            break
        with contextlib.suppress(ConnectionError):
            server.call("health", method="GET")
            return
        time.sleep(1)
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-TAIL_LINES:])
    raise AssertionError(f"the server does not answer (exit code {process.poll()}):\n{tail}")


def tokens_sampled(url: str) -> float:
    """By the server since it started, as its metrics count them."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    counts = [line for line in lines if line.startswith("vllm:generation_tokens_total")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in counts)


def ask(
    url: str, prompts: Sequence[Prompt], max_tokens: int = 16
) -> tuple[list[list[Completion]], list[list[dict]]]:
    """Greedy responses, one a prompt, and their spans of weight versions."""
    groups, spans = [], []
    for prompt in prompts:
        params = {"temperature": 0.0, "max_tokens": max_tokens, "logprobs": 0, "ignore_eos": True}
        body = {"token_ids": list(prompt.token_ids), "sampling_params": params}
        (choice,) = HttpServer(url).call("inference/v1/generate", body)["choices"]
        logprobs = tuple(token["logprob"] for token in choice["logprobs"]["content"])
        tokens = tuple(choice["token_ids"])
        groups.append([Completion(tokens, logprobs, truncated=True, weight_version=0)])
        spans.append(choice["weight_versions"])
    return groups, spans
