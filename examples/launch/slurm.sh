#!/bin/sh
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
# Slurm: one launcher a node, which starts a rank for each of its GPUs or cores and restarts the job when one fails.
# Two minutes before the time limit the ranks get SIGUSR1. A program that saves then and ends with status 75 (examples/resume.cpp)
# is requeued, and resumes where it was.
# Slurm gives a task one core unless told: with sbatch --exclusive a launcher has all of its node.
#   sbatch slurm.sh PROGRAM ARGS
# (`srun PROGRAM ARGS` without a launcher works, too: one task a rank, and Slurm's own handling of failures.)
LOCKSTEP_TOKEN=$(openssl rand -hex 32)  # goes to the tasks in their environment, never into an argument list
export LOCKSTEP_TOKEN
status=0
srun --export=ALL --kill-on-bad-exit=0 lockstep run --nproc-per-node "${RANKS:-auto}" --max-restarts "${RESTARTS:-0}" "$@" || status=$?
# Of a job array this task alone: the last one's SLURM_JOB_ID is also the id of the whole array.
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
[ "$status" -ne 75 ] || scontrol requeue "${job:-$SLURM_JOB_ID}"
exit "$status"
