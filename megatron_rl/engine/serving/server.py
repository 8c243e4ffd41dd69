"""A stock vLLM server whose answers are those of the engine inside a trainer: its command line, and
its process. ``megatron_rl.serve`` runs one."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import torch

from megatron_rl.runtime.process import FOR_CHILDREN, die_with_parent

_ENDS_WITHIN_S = 10.0
# Of ``engine_arguments``, what only an engine inside another program has: how its ranks find each
# other, how weights get into it, what it shows.
_OF_THE_LIBRARY = {
    "distributed_executor_backend",
    "worker_extension_cls",
    "use_tqdm_on_load",
    "enable_sleep_mode",
    "distributed_timeout_seconds",
    "cpu_distributed_timeout_seconds",
}


def server_command(arguments: Mapping[str, Any], host: str, port: int) -> list[str]:
    """The command that starts vLLM's own server with the ``engine_arguments`` of a run.

    It answers token ids with token ids, takes weights from a trainer, and needs the secret of the
    run with every request.
    """
    words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    words += ["--host", host, "--port", str(port)]
    for name, value in arguments.items():
        if name not in _OF_THE_LIBRARY:
            words += _option(name, value)
    words += ["--weight-transfer-config", '{"backend": "megatron_rl"}']
    words += ["--middleware", "megatron_rl.engine.serving.guard.RequireSecret"]
    return [*words, "--enable-scale-out", "--disable-uvicorn-access-log"]


def _option(name: str, value: Any) -> list[str]:
    option = f"--{name.replace('_', '-')}"
    if value is None:
        return []
    if isinstance(value, Mapping):
        return [option, json.dumps(value)]
    if isinstance(value, bool):
        return [option if value else f"--no-{option[2:]}"]
    if isinstance(value, list):
        return [option, *map(str, value)]
    return [option, str(value)]


def start_server(
    command: list[str], environment: Mapping[str, str], secret: str, *, batch_invariant: bool
) -> subprocess.Popen[bytes]:
    """The process of the server; it is killed when this one ends, however that ends.
    ``environment``: of this process."""
    own = {
        "VLLM_BATCH_INVARIANT": str(int(batch_invariant)),
        "VLLM_API_KEY": secret,
        "VLLM_SERVER_DEV_MODE": "1",  # the commands to pause and to take weights
        "VLLM_NO_USAGE_STATS": "1",
        FOR_CHILDREN: "1",  # its engines, which would outlive a server that is killed
    }
    if not torch.cuda.is_available():
        # Else every worker needs a NUMA node of its own, and small functions are compiled.
        own |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}
    return subprocess.Popen(
        command,
        env={**environment, **own},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=die_with_parent,
    )


def end_server(process: subprocess.Popen[bytes]) -> None:
    """Ends the server and its engines, which would outlive it."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_ENDS_WITHIN_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def free_port(host: str) -> int:
    """A port that is not in use at the moment."""
    with socket.socket() as probe:
        try:
            probe.bind((host, 0))
        except OSError as error:
            raise ValueError(f"--host {host}: no address of this machine ({error})") from error
        return int(probe.getsockname()[1])
