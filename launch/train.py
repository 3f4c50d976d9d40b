"""Trains stock Megatron-core's GPTModel with either loss. Starts itself under torchrun if torchrun did not start it.

torchrun's own arguments may come first, ended by `--`; without them all processes run on this host.
"""

import os
import sys

from training.config import parse_command_line
from training.launch import environment, prepare_text, split_arguments, torchrun_command


def main() -> None:
    torchrun, arguments = split_arguments(sys.argv[1:])
    config = parse_command_line(__doc__, arguments)
    if "LOCAL_RANK" in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import record

        from training.worker import run

        record(run)(config)  # lets torchrun show the error of the rank that failed first
    else:
        prepare_text(config)
        command = torchrun_command(config, torchrun, arguments)
        os.execve(command[0], command, environment(config))


if __name__ == "__main__":
    main()
