"""Trains stock Megatron-core's GPTModel with either loss. Starts itself under torchrun if torchrun did not start it."""

import os
import sys

from training.config import parse_command_line


def main() -> None:
    arguments = sys.argv[1:]
    config = parse_command_line(__doc__, arguments)
    if "LOCAL_RANK" in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import record

        from training.worker import run

        record(run)(config)  # lets torchrun show the error of the rank that failed first
    else:
        from training.launch import environment, prepare_text, torchrun_command

        prepare_text(config)
        command = torchrun_command(config, arguments)
        os.execve(command[0], command, environment(config))


if __name__ == "__main__":
    main()
