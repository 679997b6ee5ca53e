#!/bin/sh
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
# A task for each rank, and no launcher: `lockstep train` finds its rank in Slurm's variables.
# Two minutes before the time limit the ranks save and end with status 75; the job is requeued, and `resume: latest` resumes it.
#   sbatch slurm.sh run.yaml --set training.epochs=3
status=0
srun --kill-on-bad-exit=1 lockstep train "$@" || status=$?
# Of a job array this task alone: the last one's SLURM_JOB_ID is also the id of the whole array.
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
[ "$status" -ne 75 ] || scontrol requeue "${job:-$SLURM_JOB_ID}"
exit "$status"
