"""What this process is doing, and a count that grows while it gets on.

The count tells work that takes long from work that hangs (``runtime/guard/heartbeat.py``). Notes
are free enough for every step of an engine and every micro-batch.
"""

from dataclasses import dataclass


@dataclass
class Activity:
    """``count``: notes so far; ``doing``: the last of them."""

    count: int = 0
    doing: str = "starting"

    def note(self, doing: str) -> None:
        """Something was done, or begins: ``note("generating")``. Waiting for others is nothing."""
        self.doing = doing
        self.count += 1


ACTIVITY = Activity()
