"""A vLLM server for a run with ``source=servers``.

    python -m megatron_rl.serve experiment=NAME run_dir=DIR key=value ...

The same words as the trainer's, above all the same ``run_dir``, where the server registers. It gets
its weights from the trainer, serves for as long as this command runs, and may come and go while the
trainer works. CUDA_VISIBLE_DEVICES selects its GPUs; it needs ``rollout.tensor *
rollout.pipeline`` of them.
"""

from __future__ import annotations

import argparse
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_rl.config.cli.command_line import add_root, root_of
from megatron_rl.config.cli.parser import parser_of
from megatron_rl.config.load import compose, validate
from megatron_rl.config.rules.engine_checks import engine_side
from megatron_rl.config.schema import Config
from megatron_rl.errors import ConfigError
from megatron_rl.plugins import add_plugin_option, load_plugins

if TYPE_CHECKING:
    from megatron_rl.engine.requests import MultimodalConfig
    from megatron_rl.weight_sync.fleet.commands import HttpServer

_HEALTH_S = 5.0
_BEATS_A_LEASE = 6
logger = logging.getLogger(__name__)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__, "python -m megatron_rl.serve")
    add = parser.add_argument
    add("overrides", nargs="*", metavar="key=value")
    add("--host", default="127.0.0.1", help="address of this machine that the trainer reaches")
    add("--port", type=int, default=0, help="default: a free one")
    silent = "silent for longer, the server counts as gone"
    add("--lease-s", type=float, default=30.0, help=silent)
    add_root(parser)
    add_plugin_option(parser)
    return parser.parse_intermixed_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Ends the process: 0 when it was asked to end or is not wanted any more, 1 on any error."""
    options = arguments(argv)
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # it asks the trainer to save; servers inherit it
    try:
        root = root_of(options)
        load_plugins(options.plugin)
        values = compose(root.config_name, options.overrides, root.config_dir)
        config = validate(Config, values, "the configuration")
        if not config.source.is_servers:
            raise ValueError("source: this run has engines of its own; servers need source=servers")
        if not (0 <= options.port < 2**16 and options.lease_s > 0):
            raise ValueError(
                f"--port {options.port} --lease-s {options.lease_s:g}: a port is 0 (a free one) to"
                " 65535, a lease above 0"
            )
        problems, _ = engine_side(config, config.rollout.ranks, None, None)
        if problems:
            raise ConfigError(problems, "the configuration")
        serve(config, options)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


def serve(config: Config, options: argparse.Namespace) -> None:
    """Runs a server and renews its registration until the server ends, this process is told to end,
    or the trainer has removed the registration.

    Raises:
        ValueError: the server did not start, or it ended.
    """
    # Deferred until the configuration is valid: importing torch takes seconds.
    from megatron_rl.engine.arguments import engine_arguments, served_settings
    from megatron_rl.engine.requirements import check_start
    from megatron_rl.engine.routed_experts import RETURNED
    from megatron_rl.engine.serving import server
    from megatron_rl.runtime.registry import FOLDER, Lease, Registration, run_secret
    from megatron_rl.weight_sync.fleet.commands import HttpServer

    check_start(config.rollout)
    arguments = engine_arguments(config.model.path, config.rollout, config.seed, multimodal(config))
    if config.rollout.router_replay == "rollout" and not arguments.keys() & RETURNED:
        raise ValueError(
            "rollout.router_replay = rollout: vLLM's server returns experts where it has Triton, on"
            " GPUs; use engines of the run (source=colocated), or set it to old_policy"
        )
    folder = Path(config.run_dir) / FOLDER
    secret = run_secret(folder)
    host = options.host
    port = options.port or server.free_port(host)
    seen = HttpServer(f"http://{host}:{port}", _HEALTH_S, secret)
    command = server.server_command(arguments, host, port)
    invariant = config.rollout.batch_invariant
    process = server.start_server(command, os.environ, secret, batch_invariant=invariant)
    lease: Lease | None = None
    try:
        while not _is_healthy(seen):
            _refuse_ended(process, "did not start")
            time.sleep(1.0)
        name = f"{socket.gethostname()}-{port}-{secrets.token_hex(2)}"
        settings = served_settings(config.rollout)
        lease = Lease(folder, Registration(name, seen.url, 0, options.lease_s, settings))
        logger.info("server %s: %s waits for a trainer in %s", name, seen.url, config.run_dir)
        while lease.is_held:
            time.sleep(options.lease_s / _BEATS_A_LEASE)
            _refuse_ended(process, "ended")
            if _is_healthy(seen):
                lease.renew()
        logger.info("server %s: the trainer has removed it, so it ends", name)
    finally:
        if lease is not None:
            lease.end()
        server.end_server(process)


def _is_healthy(server: HttpServer) -> bool:
    try:
        server.alive()
    except ConnectionError:
        return False
    return True


def _refuse_ended(process: subprocess.Popen[bytes], what: str) -> None:
    if process.poll() is not None:
        raise ValueError(
            f"the vLLM server {what} (exit code {process.returncode}); its own output says why"
        )


def multimodal(config: Config) -> MultimodalConfig | None:
    """Settings for the images of the prompts, which are read for it; None for a model of text."""
    from megatron_rl.data.multimodal.vision import vision_of
    from megatron_rl.data.reading import read_data
    from megatron_rl.data.tokenizer import load_tokenizer
    from megatron_rl.engine.requests import multimodal_config

    vision = vision_of(config.model.path, config.data)
    if vision is None:
        return None
    data = read_data(config, load_tokenizer(config.model.path), vision)
    return multimodal_config([*data.train_prompts, *data.held_out_prompts], vision)


if __name__ == "__main__":
    sys.exit(main())
