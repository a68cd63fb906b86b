"""`python -m accel_ddp.doctor`, also under `accelerate launch -m` and `torchrun -m`, where one rank per node prints."""

import sys

from accel_ddp.doctor.doctor_command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
