"""What is said of an error, and which one is a consequence of another rank's end."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys

import psutil
import pytest
import torch.distributed as dist

from megatron_rl.errors import concerning
from megatron_rl.runtime import process
from megatron_rl.runtime.guard import failure
from megatron_rl.runtime.guard.failure import (
    FailureMessage,
    describe,
    is_consequence,
    write_error_file,
)
from tests.launch import REPO


def raised(error: BaseException) -> BaseException:
    with pytest.raises(type(error)) as caught:
        raise error
    return caught.value


@pytest.mark.parametrize("error", [ValueError("a: b; c"), FileNotFoundError("a: b; c")])
def test_a_user_error_is_its_text(error):
    assert describe(error) == FailureMessage("error: a: b; c")


@pytest.mark.parametrize(
    "error", [KeyError("x"), RuntimeError("x"), UnicodeDecodeError("utf-8", b"x", 0, 1, "bad")]
)
def test_a_fault_has_its_traceback_above(error):
    message = describe(raised(error))
    assert message.text.startswith(f"[rank 0] error: {type(error).__name__}: ")
    assert message.traceback.startswith("Traceback (most recent call last)")
    assert message.traceback.count("raise error") == 1


def test_a_message_has_at_most_twelve_lines():
    exact = describe(ValueError("\n".join(map(str, range(12)))))
    assert exact.text.splitlines()[-1] == "11"
    cut = describe(ValueError("\n".join(map(str, range(13))))).text.splitlines()
    assert len(cut) == 12
    assert cut[-2:] == ["10", "  ... and 2 more lines"]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (MemoryError(), "rank 0 is out of memory: MemoryError."),
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory"
            ),
            "out of memory",
        ),
        (
            RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
            "out of memory: CUDA out of",
        ),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "out of memory"),
        (RuntimeError("Resource temporarily unavailable"), "out of memory or of threads"),
    ],
)
def test_memory_is_said_in_words(error, text):
    message = describe(raised(error))
    assert text in message.text
    assert message.traceback == ""
    assert len(message.text.splitlines()) <= 4


def test_a_lock_that_is_taken_is_no_lack_of_memory():
    assert (
        "memory"
        not in describe(BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")).text
    )


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            RuntimeError(
                "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:554] Connection closed by"
                " peer [1]"
            ),
            True,
        ),
        (
            RuntimeError(
                "Rank 1 successfully reached monitoredBarrier ... Connection reset by peer GLHF!"
            ),
            True,
        ),
        (dist.DistBackendError("NCCL communicator was aborted"), True),
        (dist.DistStoreError("wait timeout after 1000ms"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), False),  # of a server
        (ValueError("model.path: x"), False),
    ],
)
def test_broken_connections_follow_from_another_error(error, expected):
    assert is_consequence(error) is expected


def test_a_wrapped_consequence_is_still_one():
    with pytest.raises(ValueError, match="run_dir") as caught, concerning("run_dir", "free it"):
        raise RuntimeError("gloo: Connection closed by peer")
    assert is_consequence(caught.value)


def test_the_error_file_has_the_form_that_torchrun_reads(tmp_path, monkeypatch):
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    write_error_file("error: a\nb")
    read = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(file))
    assert read.message["extraInfo"]["py_callstack"] == "error: a\nb"
    assert (
        abs(read.timestamp - int(json.loads(file.read_text())["message"]["extraInfo"]["timestamp"]))
        == 0
    )


def test_what_was_saved(monkeypatch):
    monkeypatch.setattr(failure.STATE, "saved_step", None)
    assert failure.unsaved() == ""
    failure.saved(0)
    assert failure.unsaved() == "; nothing was saved"
    failure.saved(7)
    assert failure.unsaved() == "; nothing was saved since step 7"


def test_too_many_open_files_is_said_in_words_and_is_no_consequence_of_another_rank():
    error = RuntimeError(
        "[enforce fail at gloo/loop.cc:105] fd_ != -1. epoll_create: Too many open files"
    )
    assert not is_consequence(error)
    message = describe(error)
    assert not message.traceback
    assert re.search(
        r"cannot open more files.*gloo.*\nThe limit is \d+ open files \(ulimit -n\): raise it",
        message.text,
    )
    assert "ulimit" in describe(OSError(24, "Too many open files")).text


def test_a_file_that_has_gone_is_named_with_what_to_do(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        (tmp_path / "gone" / "samples.jsonl").open("a")
    message = describe(caught.value)
    assert message.text.startswith(f"error: {tmp_path}/gone/samples.jsonl: no such file or folder")
    assert "put it back" in message.text
    assert not message.traceback


def test_an_end_by_code_of_the_user_is_no_success():
    program = (
        "import sys\n"
        "from megatron_rl.runtime.guard.failure import STATE, Peer\n"
        "from megatron_rl.runtime.process import reported\n"
        "with reported():\n"
        "    STATE.peers = [Peer(0, 'here', 1)] * int(sys.argv[1])\n"
        "    sys.exit(0)\n"
    )
    for met, code in ((0, 0), (1, 1)):
        done = subprocess.run(
            [sys.executable, "-c", program, str(met)], capture_output=True, text=True, cwd=REPO
        )
        assert done.returncode == code, done.stderr
    assert "error: RuntimeError: sys.exit(0) inside of the run" in done.stderr


def test_an_error_of_a_file_names_it_without_a_traceback():
    error = OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), "runs/long")
    text = "error: runs/long: File name too long; check the path, its permissions and its disk"
    assert describe(error) == FailureMessage(text)


def test_a_limit_on_the_size_of_files_is_named():
    message = describe(OSError(errno.EFBIG, os.strerror(errno.EFBIG)))
    assert "ulimit -f" in message.text and not message.traceback


def test_the_children_of_a_server_that_is_killed_end():
    program = (
        "import multiprocessing, time\n"
        "from megatron_rl.runtime import process\n"
        "def serve():\n"
        "    process.die_with_server()\n"
        "    print(multiprocessing.current_process().pid, flush=True)\n"
        "    time.sleep(100)\n"
        "multiprocessing.get_context('fork').Process(target=serve).start()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPO), process.FOR_CHILDREN: "1"}
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment
    ) as server:
        child = psutil.Process(int(server.stdout.readline()))
        server.kill()
        assert psutil.wait_procs([child], timeout=5)[1] == []
