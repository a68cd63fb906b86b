"""The meaning of the variables, files and command lines that start a process. This package does not import torch.

`topology` determines which node and rank this process is, of how many. `launcher` reads what `accelerate launch` was asked to
start and compares it with what is running. `patient_launch` runs `accelerate launch` for `accel-ddp run`. `mpi` translates the
variables of mpirun. All import only `errors`, the standard library, yaml and psutil.
"""
