"""Train one run to its last step: what a job of the workflow calls. People use `megaboa pretrain`."""

import sys

from megaboa.commands.pretrain import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
