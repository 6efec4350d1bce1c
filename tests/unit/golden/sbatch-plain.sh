#!/bin/bash
#SBATCH --job-name=x-1
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --time=60
#SBATCH --exclusive
#SBATCH --overcommit
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=/scratch/me/bench/jobs/x-1/job.log
#SBATCH --signal=B:USR1@90
# Slurm runs this script again from the start when it requeues the job.
cd /scratch/me/bench/jobs/x-1 || exit 1
rm -f code why
attempt=${SLURM_RESTART_COUNT:-0}
if [ "$attempt" -gt 2 ]; then
  echo "it was requeued more than 2 times" > why
  echo 1 > code
  exit 1
fi
late() {
  echo "its time limit of 60 minutes is near" > why
  kill -TERM "$step"
}
trap late USR1
echo "$attempt" > attempt
srun --overcommit --cpu-bind=none --mpi=none --kill-on-bad-exit=1 python -c 'print('"'"'a b'"'"')' > "out.$attempt" 2> "err.$attempt" &
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
