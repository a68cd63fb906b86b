# @stopped: the ranks have saved and stopped, because of preemption, the time limit, or a stop on request.
# `accel-ddp stop` sets Requeue=0 before it stops the ranks.
# Another code, if Slurm preempts the job: the ranks were not ready yet, and have nothing to save.
state=$(scontrol show job "$SLURM_JOB_ID")
if [ "$code" = @stopped ] || { [ "$code" != 0 ] && [[ $state == *" PreemptTime="[0-9]* ]]; } &&
    [[ $state == *" Requeue=1 "* ]]; then
    echo "the job is requeued: restart $((${SLURM_RESTART_COUNT:-0} + 1))"
    scontrol requeue "$SLURM_JOB_ID"
fi
