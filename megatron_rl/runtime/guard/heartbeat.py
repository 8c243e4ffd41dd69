"""Ends a launch that cannot continue; one that can may wait for as long as it takes.

No collective has a time limit of its own (``launch.NO_LIMIT``): a rank may wait hours for the
longest response of another. What ends a launch is seen by a thread of every rank:

- a rank of this machine is stopped (SIGSTOP) and stays so: the kernel says it;
- no rank of a machine gives a sign: the ranks of the next machine look for its beats;
- the store of the launch is gone, and with it the machine of rank 0;
- no rank of the launch has got anything done for ``stall_s``: all wait, or work hangs.

(A rank that ends without a word is seen by its torchrun at once, see ``runtime/guard/failure.py``.)
The first cause goes through the store to all ranks, which end with it. After a stall each has
written the stacks of its threads before. A launch that is suspended as a whole is none of these:
time is counted in beats of this process, which is suspended as well.
"""

import contextlib
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from megatron_rl.errors import first_few, first_line
from megatron_rl.runtime.guard import failure
from megatron_rl.runtime.guard.activity import ACTIVITY
from megatron_rl.runtime.guard.failure import STATE, FailureMessage, Peer
from megatron_rl.runtime.guard.first_failure import bounded, connect, note_failed_host, state_of

BEAT_S = 2.0
_STOPPED_S = 8.0  # a rank that is stopped for so long does not continue
SILENT_S = 20.0  # a machine that gives no sign for so long is lost
# Libraries that are loaded from a slow disk stop all threads of a process for longer than that.
_STARTING_SILENT_S = 300.0
STALL_S = 1800.0  # until trainer.stall_limit_s is known
_ANSWER_S = BEAT_S + 1  # until every rank has seen a stall and written its stacks
_LINGER_S = 2 * BEAT_S + 1  # a cause reported here reaches other machines meanwhile

# Numbers in the store are read by adding 0: ``get`` would wait for a key that was not written.
_ALARM = "megatron_rl/alarm"  # above 0: there is a cause or a stall. All that a beat has to read
_CAUSE = "megatron_rl/cause"
_STALL = "megatron_rl/stall"
_DONE = "megatron_rl/done"  # count of all activity
_FINISHED = "megatron_rl/finished"

_STACKS_SIGNAL = signal.SIGUSR2
_SHOWN = 6  # different places in a message
_WAITING = "launch.py"  # the collectives of control: their caller says more


@dataclass
class Count:
    """A number that ought to change, and for how many beats it has not."""

    value: int = -1
    unchanged: int = 0

    def seen(self, value: int) -> float:
        """Notes the number at this beat; returns the seconds of beats without a change."""
        self.unchanged = 0 if value != self.value else self.unchanged + 1
        self.value = value
        return self.unchanged * BEAT_S


class Heartbeat:
    """One per process. Its limits ``stall_s`` and ``silent_s`` and ``folder``, where stacks go, may
    be set at any time."""

    def __init__(self, rank: int, peers: Sequence[Peer]) -> None:
        here = socket.gethostname()
        hosts = list(dict.fromkeys(peer.host for peer in peers))
        self.stall_s = STALL_S
        self.folder: Path | None = None
        self.silent_s = _STARTING_SILENT_S
        self._rank = rank
        self._peers = list(peers)
        self._local = [peer for peer in peers if peer.host == here and peer.rank != rank]
        self._here = here
        self._next = hosts[(hosts.index(here) + 1) % len(hosts)]
        self._is_alone = len(peers) == 1  # a world of one has no store
        self._stopped: dict[int, Count] = {}
        self._next_beats = Count()
        self._launch_done = Count()
        self._own_done = 0  # of this rank, as the store knows it
        self._beats = 0  # that the store has answered
        self._dumped = False
        self._deaf: list[Peer] = []  # ranks of this machine that did not answer in a stall
        STATE.goodbye = self._finish
        STATE.announce = self._announce if self._next != here else None
        answer_signal()
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()
        if not self._is_alone:
            threading.Thread(target=self._guard, name="heartbeat guard", daemon=True).start()

    def _run(self) -> None:
        store: dist.TCPStore | None = None
        try:
            store = None if self._is_alone else connect()
            while True:
                time.sleep(BEAT_S)
                if store is None:
                    self._look_at_stall(None, ACTIVITY.count)
                else:
                    self._beat(store)
                    self._beats += 1
        except RuntimeError as error:
            self._end(self._store_gone(f": {first_line(error)}"))

    def _guard(self) -> None:
        """A machine without power does not even close its connections."""
        answered = Count()
        while True:
            time.sleep(BEAT_S)
            if state_of(os.getppid()) == "T":  # Ctrl-Z: the torchrun of this machine stands still
                continue
            if answered.seen(self._beats) >= self.silent_s:
                note_failed_host(STATE.failed_host, self._peers[0].host)
                self._end(self._store_gone(""))

    def _store_gone(self, why: str) -> str:
        first = self._peers[0]
        return (
            f"the store of the launch on {first.host} (rank 0) does not answer{why}: that machine"
            " or its torchrun has ended"
        )

    def _beat(self, store: dist.TCPStore) -> None:
        store.add(_beats_of(self._here), 1)
        if store.add(_ALARM, 0):
            self._answer(store)
        self._look_at_neighbors(store)
        if self._next != self._here:
            silent_s = self._next_beats.seen(store.add(_beats_of(self._next), 0))
            if silent_s >= self.silent_s and not self._is_over(store):
                lost = failure.named([peer for peer in self._peers if peer.host == self._next])
                self._raise(
                    store,
                    f"machine {self._next} with {lost} gives no sign for {silent_s:.0f} s: without"
                    " power or network, or all its processes are stopped",
                    self._next,
                )
        count = ACTIVITY.count
        done = store.add(_DONE, count - self._own_done)
        self._own_done = count  # the store has the sum over all ranks: each adds what is new
        self._look_at_stall(store, done)

    def _look_at_neighbors(self, store: dist.TCPStore) -> None:
        """Ranks of this machine that are stopped. Not those that a debugger holds (state ``t``)."""
        lost = []
        for peer in self._local:
            if state_of(peer.pid) != "T":
                self._stopped.pop(peer.rank, None)
            elif self._stopped.setdefault(peer.rank, Count()).seen(0) >= _STOPPED_S:
                lost.append(peer)
        if lost:
            named = failure.named(lost)
            text = f"{named} {'are' if len(lost) > 1 else 'is'} stopped (SIGSTOP, state T)"
            advice = "continue it sooner, or start again"
            self._raise(store, f"{text} for {_STOPPED_S:.0f} s: {advice}", self._here)

    def _look_at_stall(self, store: dist.TCPStore | None, done: int) -> None:
        idle_s = self._launch_done.seen(done)
        if idle_s < self.stall_s:
            return
        if store is None:
            self._dump()
            self._end(stall_message(idle_s, {self._rank: place()}, self.folder))
        elif not self._is_over(store) and store.add(_STALL, 1) == 1:  # the first to see it
            store.add(_ALARM, 1)
            self._dump()
            self._raise(store, self._asked(store, idle_s), "")

    def _asked(self, store: dist.TCPStore, idle_s: float) -> str:
        """The message of a stall, after all ranks have reported where they are."""
        self._answer_stall(store)
        places: dict[int, str] = {}
        deadline = time.monotonic() + 2 * BEAT_S
        while len(places) < len(self._peers) and time.monotonic() < deadline:
            time.sleep(0.1)
            for peer in self._peers:
                if peer.rank not in places and store.check([_place_of(peer.rank)]):
                    places[peer.rank] = store.get(_place_of(peer.rank)).decode()
        for peer in self._peers:
            places.setdefault(peer.rank, "does not answer")
        return stall_message(idle_s, places, self.folder)

    def _answer(self, store: dist.TCPStore) -> None:
        """An alarm was raised: the stacks of this rank, or the end with the cause."""
        if store.check([_CAUSE]):
            STATE.announce = None  # all know it
            self._end(store.get(_CAUSE).decode())
        elif not self._dumped and store.check([_STALL]):
            self._answer_stall(store)

    def _answer_stall(self, store: dist.TCPStore) -> None:
        """Writes the stacks of this rank and says where it stands."""
        self._dump()
        store.set(_place_of(self._rank), place())
        time.sleep(_ANSWER_S)
        # A thread cannot write where the main thread never lets go of the interpreter; a handler in
        # C can. The first rank of the machine that does answer signals the others.
        self._deaf = [peer for peer in self._local if not store.check([_place_of(peer.rank)])]
        if all(peer.rank > self._rank for peer in self._local if peer not in self._deaf):
            for peer in self._deaf:
                ask(peer.pid)

    def _dump(self) -> None:
        self._dumped = True
        dump(self._rank, self.folder)

    def _is_over(self, store: dist.TCPStore) -> bool:
        """Whether a rank has finished: then the others are silent with good reason."""
        return store.add(_FINISHED, 0) > 0

    def _raise(self, store: dist.TCPStore, cause: str, host: str) -> None:
        """Ends all ranks, with the cause that was named first. ``host``: the machine at fault;
        empty: none is known to be."""
        first = store.compare_set(_CAUSE, "", cause).decode()
        if first == cause:
            note_failed_host(STATE.failed_host, host)
        store.add(_ALARM, 1)
        self._end(first)

    def _end(self, cause: str) -> None:
        """Ends this process; returns where the main thread is ending it already."""
        if not STATE.reporting.acquire(blocking=False):
            return
        # What was not saved belongs to the first line: a stall has one more for each place.
        first, *more = cause.splitlines()
        text = "\n".join([f"error: {first}{failure.unsaved()}", *more])
        code = failure.say_on_this_machine(FailureMessage(text))
        for peer in self._local:
            if state_of(peer.pid) == "T" or peer in self._deaf:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(peer.pid, signal.SIGKILL)  # torchrun would wait 30 s for it to end
        failure.exit_process(code)

    def _announce(self, text: str) -> None:
        """Tells the other machines what this one ends with."""

        def tell(store: dist.TCPStore) -> int:
            store.compare_set(_CAUSE, "", text.removeprefix("error: "))
            return store.add(_ALARM, 1)

        if _told(tell):
            time.sleep(_LINGER_S)

    def _finish(self) -> None:
        """This rank ends as it should."""
        if not self._is_alone:
            _told(lambda store: store.add(_FINISHED, 1))


def _told(tell: Callable[[dist.TCPStore], int]) -> bool:
    """Whether the store took it in time. It may be gone: then the others have ended already, or
    see that themselves."""

    def attempt() -> bool:
        try:
            return tell(connect()) > 0
        except RuntimeError:
            return False

    return bounded(attempt)


def _beats_of(host: str) -> str:
    return f"megatron_rl/beats/{host}"


def _place_of(rank: int) -> str:
    return f"megatron_rl/place/{rank}"


def answer_signal() -> None:
    """Registers a handler: ``kill -USR2 PID`` makes this process write the stacks of all its
    threads to its stderr and continue, also where the main thread is inside a library."""
    faulthandler.register(_STACKS_SIGNAL, all_threads=True)


def ask(pid: int) -> None:
    """Makes a process that has called ``answer_signal`` write its stacks, if it lives."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, _STACKS_SIGNAL)


def dump(rank: int, folder: Path | None) -> None:
    """Writes the stacks of all threads to ``folder/rank_N.txt``; to stderr where that cannot be."""
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / f"rank_{rank}.txt").open("w", encoding="utf-8") as file:
                file.write(f"rank {rank}, process {os.getpid()}: {place()}\n\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
            return
        except OSError as error:
            sys.stderr.write(f"(stacks not written to {folder}: {error.strerror})\n")
    faulthandler.dump_traceback(2, all_threads=True)


def place() -> str:
    """The place of the main thread in this package, and what it did last.

    Examples: ``rollouts.py:120 (run); last: generating``, ``waits in trainer.py:72 (run); last:
    ...`` for a rank that is in a collective of control.
    """
    # Not of the calling thread, which is mostly that of the heartbeat.
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    stack = list(traceback.extract_stack(frame))
    own = [each for each in stack if "megatron_rl" in Path(each.filename).parts] or stack
    waits = Path(own[-1].filename).name == _WAITING
    callers = [each for each in own if Path(each.filename).name != _WAITING]
    inside = (callers or own)[-1]
    where = f"{Path(inside.filename).name}:{inside.lineno} ({inside.name})"
    if waits:
        where = f"waits in {where}"
    return f"{where}; last: {ACTIVITY.doing}"


def rank_list(numbers: list[int]) -> str:
    """Example: ``[1, 3]`` gives ``ranks 1, 3``; of many the first eight."""
    shown = ", ".join(first_few([str(number) for number in numbers], rest="..."))
    return f"rank{'s' * (len(numbers) > 1)} {shown}"


def stall_message(idle_s: float, places: Mapping[int, str], folder: Path | None) -> str:
    """The message for a launch that hangs: the ranks, grouped by where they are."""
    by_place: dict[str, list[int]] = {}
    for rank, where in sorted(places.items()):
        by_place.setdefault(where, []).append(rank)
    # The fewest first: the many wait for them.
    groups = sorted(by_place.items(), key=lambda item: len(item[1]))
    lines = [f"  {rank_list(ranks)}: {where}" for where, ranks in groups]
    lines = first_few(lines, _SHOWN, "  and {} more places")
    written = "" if folder is None else f"; the stacks of all threads are in {folder}"
    limit = "raise trainer.stall_limit_s if this was work"
    first = f"no rank has got anything done for {idle_s:.0f} s ({limit}){written}"
    return "\n".join([first, *lines])
