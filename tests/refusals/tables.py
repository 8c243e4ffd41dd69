"""The rows: mistakes of users, and what looks like one.

A row has a ``title``, the overrides ``set`` on top of a good command line, and the input that is
changed (``inputs.py``). ``says``: patterns of its message. ``reaches``: it is not refused, and what
it says are notices. ``command``: a program other than the trainer, with ``set`` as its words.
"""

from pathlib import Path

import yaml

TABLES = {
    path.stem: yaml.safe_load(path.read_text())
    for path in sorted(Path(__file__).parent.glob("*.yaml"))
}
