"""torchrun without its box: ``python -m megatron_rl.runtime.torchrun`` takes torchrun's arguments.

A rank of this program prints its error itself, once (``guard/failure.py``); torchrun prints it
again below a traceback of its own. Here that is left out. What no rank could say, such as its end
by a signal, is shown by torchrun as ever.
"""

import logging
import sys
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

_NO_ERROR_FILE = "<N/A>"


def main(argv: Sequence[str] | None = None) -> None:
    """Exits with the status of the first rank that failed."""
    # "Sending process ... closing signal", "failed (exitcode: 1) ...": the rank has said why.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        run(parse_args(argv))
    except ChildFailedError as error:
        _, first = error.get_first_failure()
        # A rank that has reported its error has written the file that torchrun reads.
        if first.exitcode <= 0 or first.error_file == _NO_ERROR_FILE:
            raise
        sys.exit(first.exitcode)


if __name__ == "__main__":
    main()
