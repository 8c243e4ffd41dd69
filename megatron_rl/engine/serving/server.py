"""A stock vLLM server whose answers are those of the engine inside a trainer: its command line, and
its process."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, Request, build_opener

import torch

from megatron_rl.config.schema import Config, RolloutConfig
from megatron_rl.engine.arguments import engine_arguments, served_settings
from megatron_rl.engine.requests import MultimodalConfig
from megatron_rl.engine.requirements import require_vllm
from megatron_rl.runtime.guard.parent import FOR_CHILDREN, die_with_parent
from megatron_rl.runtime.registry import FOLDER, Lease, Registration, run_secret

_ENDS_WITHIN_S = 10.0
_HEALTH_S = 5.0
_BEATS_A_LEASE = 6
logger = logging.getLogger(__name__)
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


def server_command(
    model_path: str,
    config: RolloutConfig,
    multimodal: MultimodalConfig | None = None,
    *,
    seed: int,
    host: str,
    port: int,
) -> list[str]:
    """The command that starts vLLM's own server with the settings of ``rollout``.

    It answers token ids with token ids, takes weights from a trainer, and needs the secret of the
    run with every request.
    """
    arguments = engine_arguments(model_path, config, seed, multimodal)
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
    command: list[str], environment: Mapping[str, str], secret: str
) -> subprocess.Popen[bytes]:
    """The process of the server; it is killed when this one ends, however that ends.

    Args:
        environment: of this process.
    """
    own = {
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


def serve(
    config: Config,
    *,
    host: str,
    port: int,
    lease_s: float,
    environment: Mapping[str, str],
    multimodal: MultimodalConfig | None = None,
) -> None:
    """Runs a server and renews its registration until the server ends, this process is told to end,
    or the trainer has removed the registration. ``port``: 0 for a free one. ``lease_s``: how long
    it may be silent. ``multimodal``: None where no prompt has images.

    Raises:
        ValueError: the server did not start, or it ended.
    """
    require_vllm()
    folder = Path(config.run_dir) / FOLDER
    secret = run_secret(folder)
    port = port or free_port(host)
    url = f"http://{host}:{port}"
    command = server_command(
        config.model.path, config.rollout, multimodal, seed=config.seed, host=host, port=port
    )
    process = start_server(command, environment, secret)
    lease: Lease | None = None
    try:
        while not is_well(url, secret):
            _refuse_ended(process, "did not start")
            time.sleep(1.0)
        name = f"{socket.gethostname()}-{port}-{secrets.token_hex(2)}"
        settings = served_settings(config.rollout)
        lease = Lease(folder, Registration(name, url, 0, lease_s, settings))
        logger.info("server %s: %s waits for a trainer in %s", name, url, config.run_dir)
        while lease.is_held:
            time.sleep(lease_s / _BEATS_A_LEASE)
            _refuse_ended(process, "ended")
            if is_well(url, secret):
                lease.renew()
        logger.info("server %s: the trainer has removed it, so it ends", name)
    finally:
        if lease is not None:
            lease.end()
        end_server(process)


def is_well(url: str, secret: str) -> bool:
    """Whether a server answers, and its engine lives."""
    request = Request(f"{url}/health", headers={"Authorization": f"Bearer {secret}"})
    try:
        with build_opener(ProxyHandler({})).open(request, timeout=_HEALTH_S):
            return True
    except OSError:
        return False


def _refuse_ended(process: subprocess.Popen[bytes], what: str) -> None:
    if process.poll() is not None:
        raise ValueError(
            f"the vLLM server {what} (exit code {process.returncode}); its own output says why"
        )
