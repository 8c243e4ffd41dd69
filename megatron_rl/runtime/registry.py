"""Servers that wait for a run, in a folder that trainer and servers see: ``run_dir/servers``.

A server has one file there, ``<name>.json``, and writes it again and again: each time with the next
number of ``beat``. Clocks of machines differ, so they are not compared: the trainer counts by its
own clock how long a number has not changed, and after ``lease_s`` of that the server counts as
gone. A removed file means to the server that it is not needed any more.

``secret`` is the run's: a request to a server, and the workers that take weights, prove that they
know it. Only processes that can read the folder can take part.
"""

import errno
import logging
import math
import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from megatron_rl.runtime.plain_data import MalformedMessageError, decoded, encoded

FOLDER = "servers"
SECRET = "secret"
_SECRET_BYTES = 32
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Registration:
    """The content of a server's file.

    Example: ``Registration("node3-8000-1f2e", "http://127.0.0.1:8000", beat=7, lease_s=30.0)``.
    """

    name: str
    url: str  # as the trainer reaches it
    beat: int  # how often it has written this
    lease_s: float  # a server without a beat for longer counts as gone
    # By configuration key, what it was started with that its answers depend on.
    serves: Mapping[str, str] = field(default_factory=dict)
    place: int = 0  # number of the folder (inode) that it writes into; 0: not known


def run_secret(folder: Path) -> str:
    """The secret of the run, made at the first use; only the owner can read it.

    Raises:
        ValueError: others can read it, or it is empty.
    """
    path = folder / SECRET
    folder.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        # Made aside: a reader of ``path`` gets a whole secret, and of several that make one at
        # the same time the first gives the name.
        aside = folder / f"{SECRET}.{secrets.token_hex(4)}"
        aside.touch(mode=0o600)
        aside.write_text(secrets.token_hex(_SECRET_BYTES) + "\n", encoding="ascii")
        try:
            os.link(aside, path)  # fails where another process was first
        except FileExistsError:
            logger.debug("%s was made by another process", path)
        finally:
            aside.unlink()
    if path.stat().st_mode & 0o077:
        raise ValueError(
            f"{path}: others can read the secret of this run (chmod 600 {path}, or remove it and"
            " start trainer and servers again)"
        )
    text = path.read_text(encoding="ascii").strip()
    if not text:
        raise ValueError(f"{path}: is empty; remove it and start trainer and servers again")
    return text


class Lease:
    """A server's own file. ``is_held`` turns false when the trainer has removed it. Files of others
    that name its address are of servers that were killed there, and removed."""

    def __init__(self, folder: Path, registration: Registration) -> None:
        self._path = folder / f"{registration.name}.json"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._registration = replace(registration, place=folder.stat().st_ino)
        for other in Registry(folder).look().values():
            if other.url == registration.url and other.name != registration.name:
                message = "server %s was at %s before this one; removed"
                logger.warning(message, other.name, other.url)
                (folder / f"{other.name}.json").unlink(missing_ok=True)
        self._write()

    @property
    def is_held(self) -> bool:
        return self._path.exists()

    def renew(self) -> None:
        """Another beat; does nothing when the file is gone."""
        if self.is_held:
            self._registration = replace(self._registration, beat=self._registration.beat + 1)
            self._write()

    def end(self) -> None:
        self._path.unlink(missing_ok=True)

    def _write(self) -> None:
        partial = self._path.with_suffix(".partial")
        partial.write_bytes(encoded(self._registration, Registration))
        partial.replace(self._path)


@dataclass
class Registry:
    """What the trainer sees of ``run_dir/servers``.

    Attributes:
        settings: those of the run; a server that was started with others is not used.
    """

    folder: Path
    clock: Callable[[], float] = time.monotonic
    settings: Mapping[str, str] = field(default_factory=dict)
    # By name, with the time of its last change.
    _seen: dict[str, tuple[Registration, float]] = field(default_factory=dict)
    _malformed: set[str] = field(default_factory=set)
    _removed: set[str] = field(default_factory=set)

    def look(self) -> dict[str, Registration]:
        """The servers that have written within their lease, by name."""
        now = self.clock()
        present: dict[str, tuple[Registration, float]] = {}
        for path in sorted(self.folder.glob("*.json")):
            if path.stem in self._removed:
                path.unlink(missing_ok=True)  # its server was writing while it was removed
                continue
            registration = self._read(path)
            if registration is None:
                continue
            # Any change counts, not only a larger beat: a server that is started again begins at 0.
            before, changed_at = self._seen.get(
                registration.name, (registration, self._first_change(path, registration, now))
            )
            present[registration.name] = (
                registration,
                changed_at if before == registration else now,
            )
        self._seen = present
        return {
            name: registration
            for name, (registration, changed_at) in present.items()
            if now - changed_at <= registration.lease_s
        }

    def _first_change(self, path: Path, registration: Registration, now: float) -> float:
        """Of a server that is seen for the first time. In a copy of a run's folder its file never
        changes; some file systems number one folder twice, and there it does."""
        if registration.place in (0, self.folder.stat().st_ino):
            return now
        self._warn_once(
            path,
            f"server {registration.name} registered in another folder, of which {self.folder} is a"
            " copy, and does not write here",
        )
        return -math.inf

    def remove(self, name: str) -> None:
        """The server is not to come back under this name, which no other start of one has."""
        self._removed.add(name)
        (self.folder / f"{name}.json").unlink(missing_ok=True)
        self._seen.pop(name, None)

    def _read(self, path: Path) -> Registration | None:
        try:
            registration = decoded(path.read_bytes(), Registration, str(path))
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            # On NFS: its server has replaced the file since it was opened. The next look sees the
            # new one; until then the server is where it was.
            return self._seen[path.stem][0] if path.stem in self._seen else None
        except MalformedMessageError as error:
            self._warn_once(path, str(error))
            return None
        # The name becomes that of a file to be removed: no file may name another.
        if registration.name != path.stem:
            self._warn_once(path, f"{path}: names a server {registration.name}")
            return None
        for key, value in self.settings.items():
            there = registration.serves.get(key, "unknown")
            if there != value:
                self._warn_once(
                    path,
                    f"server {registration.name}: {key} = {there}, this run has {value}: start"
                    " megatron_rl.serve with the overrides of the run",
                )
                return None
        return registration

    def _warn_once(self, path: Path, problem: str) -> None:
        if path.name not in self._malformed:
            self._malformed.add(path.name)
            logger.warning("%s; it is not used", problem)
