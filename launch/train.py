"""Trains stock Megatron-core's GPTModel with either loss. Starts itself under torchrun if torchrun did not start it.

torchrun's own arguments may come first, ended by `--`; without them all processes run on this host.
"""

import os
import sys
import time
from typing import TYPE_CHECKING, NoReturn

from training.packages import require
from training.refusal import Refusal, fail

if TYPE_CHECKING:
    from training.config import Config


def main() -> None:
    require("omegaconf", "pydantic", "rich", "tokenizers", "numpy", "torch", "megatron.core")
    from training.config import parse_command_line
    from training.torchrun import split_arguments, started_by_torchrun

    torchrun, arguments = split_arguments(sys.argv[1:])
    config = parse_command_line(__doc__, arguments)
    if started_by_torchrun():
        from torch.distributed.elastic.multiprocessing.errors import record

        record(train)(config)  # lets torchrun show the error of the rank that failed first
        return

    from training.host import check_host
    from training.start import environment, prepare_text, torchrun_command

    check_host(config, torchrun)
    prepare_text(config)
    command = torchrun_command(config, torchrun, arguments)
    os.execve(command[0], command, environment(config))


def train(config: "Config") -> None:
    """Trains on this rank. Its refusals end here, since `record` would print their traceback."""
    from training.worker import run

    try:
        run(config)
    except Refusal as refusal:
        end(refusal)


def end(refusal: Refusal) -> NoReturn:
    if os.environ.get("LOCAL_RANK", "0") != "0":  # one line per host
        # torchrun ends every rank once one has ended. Rank 0 may be slower, and must have spoken.
        time.sleep(10)
        sys.exit(2)
    fail(str(refusal))


if __name__ == "__main__":
    try:
        main()
    except Refusal as refusal:
        end(refusal)
