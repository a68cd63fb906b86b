#!/bin/bash
# @job: @size each, for `accel-ddp launch @file`.
@directives
export FOLDER=@folder SCRIPT=@script
@{venv}export PYTHONUNBUFFERED=1
# The launchers give their ranks as long to save as Slurm gives the job.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=@signal_seconds
@exports
# The nodes recognize each other by a secret of this run. srun gives it to them with the other variables.
export ACCEL_DDP_TOKEN="${ACCEL_DDP_TOKEN:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}"

# The first node of the list is the main node. The port depends on the job id, so that jobs on one node do not collide.
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n @nodes | paste -sd ,)
export MAIN_ADDRESS=@address MAIN_PORT=@port

# ---- These functions run on each node.
fail() {
    echo "error: $(hostname): $1" >&2
    exit @user_error
}

enter() {
    cd "$FOLDER" || fail "folder $FOLDER: this node cannot enter it. Put the code there, or change the key folder."
    @activate
}

check() {
    trap "exit @stopped" USR2
    enter
    command -v @launcher >/dev/null ||
        fail "the PATH of this node has no @launcher. Set the key venv to an environment with accel_ddp."
    [ -f "$SCRIPT" ] || fail "there is no $SCRIPT in $FOLDER on this node."
    # Slurm gives a task one CPU by default. nproc returns OMP_NUM_THREADS if it is set.
    cpus=$(env -u OMP_NUM_THREADS nproc)
    [ "$cpus" -ge @ranks ] || echo "warning: $(hostname): CPUs of the job: $cpus, ranks: @ranks. Set the key slurm.cpu." >&2
}

train() {
    # Slurm signals every process. The launcher blocks USR2, so a stop that arrives before the ranks handle it is not lost.
    trap "exit @stopped" USR2
    enter
    trap "" USR2
    exec python3 -ISc @block @command
}

on_each_node() {
    # With --kill-on-bad-exit=1, the first launcher that exits would kill the others while they save, and srun returns 143.
    # With --cpu-bind=none, the ranks use all CPUs of the job on their node. The ranks do not use MPI.
    srun --nodes=@nodes --ntasks=@nodes --ntasks-per-node=1 --nodelist="$nodes" \
        --export=ALL --kill-on-bad-exit=0@label \
        --cpu-bind=none --mpi=none \
        @{overlap}bash -c "$(declare -f fail enter check train); $1"
}

# All nodes are checked before a launcher waits for the others.
on_each_node check && on_each_node train
code=$?
@{requeue}exit "$code"
