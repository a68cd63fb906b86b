"""`python -m accel_ddp.doctor`, also under `accelerate launch -m` and `torchrun -m`: the ranks of one node are one patient."""

import sys

from accel_ddp.doctor.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
