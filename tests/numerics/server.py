"""A stock vLLM server of a model on disk, in processes of its own, and what it answers."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from megatron_rl.types import Completion, Prompt
from megatron_rl.weight_sync.server import HttpServer
from tests.launch import REPO, TAIL_LINES, end

STARTS_WITHIN_S = 200


@contextlib.contextmanager
def serving(model: Path, tensor: int, folder: Path) -> Iterator[str]:
    """The address of a server that answers. Every process of it is dead afterwards."""
    port = free_port()
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--host", "127.0.0.1", "--port", port,
        "--tensor-parallel-size", tensor, "--weight-transfer-config", '{"backend": "megatron_rl"}', "--dtype", "float32",
        "--enforce-eager", "--skip-tokenizer-init", "--max-model-len", 512, "--kv-cache-memory-bytes", 2**25, "--enable-scale-out",
        "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm",
    ]  # fmt: skip
    env = {**os.environ, **with_entry_point(folder), "VLLM_SERVER_DEV_MODE": "1", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # two workers may share a socket
    log = folder / "server.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [str(word) for word in command], stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env, start_new_session=True
        )
        mapped: set[Path] = set()
        try:
            wait_for(process, HttpServer(f"http://127.0.0.1:{port}"), log)
            mapped = shared_memory(process.pid)
            yield f"http://127.0.0.1:{port}"
        finally:
            mapped |= shared_memory(process.pid)
            end(process)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # engines outlive a server that died
            for segment in mapped:
                segment.unlink(missing_ok=True)  # workers that are killed leave theirs


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def with_entry_point(folder: Path) -> dict[str, str]:
    """Environment in which vLLM finds the plug-in as setup.py declares it, whatever was declared when the package was installed."""
    subprocess.run([sys.executable, "setup.py", "-q", "egg_info", "--egg-base", folder], cwd=REPO, check=True, capture_output=True)
    return {"PYTHONPATH": os.pathsep.join([str(folder), str(REPO), os.environ.get("PYTHONPATH", "")])}


def shared_memory(pid: int) -> set[Path]:
    """The named segments that the process and its descendants have mapped."""
    if not psutil.pid_exists(pid):
        return set()
    tree = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    found = set()
    for process in tree:
        with contextlib.suppress(psutil.Error):
            found |= {Path(area.path) for area in process.memory_maps() if area.path.startswith("/dev/shm/")}
    return found


def wait_for(process: subprocess.Popen, server: HttpServer, log: Path) -> None:
    for _ in range(STARTS_WITHIN_S):
        if process.poll() is not None:
            break
        with contextlib.suppress(ConnectionError):
            server.call("health", method="GET")
            return
        time.sleep(1)
    lines = log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
    raise AssertionError(f"the server does not answer (exit code {process.poll()}):\n" + "\n".join(lines))


def ask(url: str, prompts: Sequence[Prompt], max_tokens: int = 16) -> tuple[list[list[Completion]], list[list[dict]]]:
    """Greedy responses, one a prompt, and their spans of weight versions."""
    groups, spans = [], []
    for prompt in prompts:
        params = {"temperature": 0.0, "max_tokens": max_tokens, "logprobs": 0, "ignore_eos": True}
        body = {"token_ids": list(prompt.token_ids), "sampling_params": params}
        (choice,) = HttpServer(url).call("inference/v1/generate", body)["choices"]
        logprobs = tuple(token["logprob"] for token in choice["logprobs"]["content"])
        groups.append([Completion(tuple(choice["token_ids"]), logprobs, truncated=True, weight_version=0)])
        spans.append(choice["weight_versions"])
    return groups, spans
