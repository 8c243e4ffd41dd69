"""How far a weight sync got: the same stages for every way to sync, and their words in messages."""

from dataclasses import dataclass
from enum import IntEnum

HALF_UPDATED = (
    "The weights of the rollout engine are half updated: do not sample from it, rebuild it"
)


class Stage(IntEnum):
    """How far this rank is. It decides which ranks have to learn of a failure, and what the engine
    still holds: up to READYING nothing has moved and the old weights serve on."""

    NOT_BEGUN = 0
    INVITED = 1  # servers only: the server is paused and its workers are called
    READYING = 2  # every rank checks what it is to send; a problem is raised on all of them
    OPENING = 3  # the engine opens its parameters; peers may be waiting for this rank
    GATHERING = 4  # gather only: inside a collective of the policy, where peers cannot be notified
    MOVING = 5  # an engine may hold old and new weights
    COMPARING = 6  # received against sent; a difference is raised on every rank
    FINISHING = 7  # all weights are in place and right, the engine processes the last of them
    COMPLETE = 8  # on every rank

    @property
    def moved(self) -> bool:
        """Whether an engine may have lost old weights."""
        return self > Stage.READYING


@dataclass
class SyncProgress:
    """The sync to one weight version, as far as this rank got.

    Example: ``str(SyncProgress(3, Stage.MOVING))`` is "the update to weight version 3 failed".
    """

    version: int
    stage: Stage = Stage.NOT_BEGUN

    def __str__(self) -> str:
        if self.stage is Stage.NOT_BEGUN:
            outcome = "did not begin, nothing has moved"
        elif not self.stage.moved:
            outcome = "did not begin"
        elif self.stage is Stage.COMPLETE:
            outcome = "is complete, but the server did not resume"
        else:
            outcome = "failed"
        return f"the update to weight version {self.version} {outcome}"
