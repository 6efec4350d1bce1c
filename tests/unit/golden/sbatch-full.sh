#!/bin/bash
#SBATCH --job-name=x-2
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=4
#SBATCH --time=30
#SBATCH --partition=gpu
#SBATCH --account=lab1
#SBATCH --qos=short
#SBATCH --constraint=skylake&ib
#SBATCH --reservation=course
#SBATCH --gpus-per-node=a100:4
#SBATCH --exclusive
#SBATCH --overcommit
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --mem=0
#SBATCH --gres-flags=enforce-binding
#SBATCH --output=/scratch/me/bench/jobs/x-2/job.log
#SBATCH --signal=B:USR1@90
# Slurm runs this script again from the start when it requeues the job.
cd /scratch/me/bench/jobs/x-2 || exit 1
rm -f code why
attempt=${SLURM_RESTART_COUNT:-0}
if [ "$attempt" -gt 2 ]; then
  echo "it was requeued more than 2 times" > why
  echo 1 > code
  exit 1
fi
module load gcc/13 || exit 1
module load cuda/13.0 || exit 1
export A=1
export B='it'"'"'s'
late() {
  echo "its time limit of 30 minutes is near" > why
  kill -TERM "$step"
}
trap late USR1
echo "$attempt" > attempt
srun --overcommit --cpu-bind=none --mpi=none --kill-on-bad-exit=1 true > "out.$attempt" 2> "err.$attempt" &
step=$!
wait "$step"
code=$?
# The signal ended the wait, not the step.
while kill -0 "$step" 2> /dev/null; do
  wait "$step"
  code=$?
done
# A job that is being requeued ends here, without a code.
[ "$code" = 0 ] || sleep 3
echo "$code" > code
exit "$code"
