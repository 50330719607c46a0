#!/bin/bash
# Four nodes of 8 GPUs, one process a GPU. Once, where there is a network, in the root of a checkout
# that all nodes share:
#   uv sync --extra gpu --extra gcs
# Then, in the same folder, as often as the run needs:
#   sbatch deploy/slurm.sh gs://BUCKET/runs/small
# What follows the folder goes to train.py: a config (without one, configs/small.py) and your data.
#   sbatch deploy/slurm.sh /shared/runs/a --config=configs/qwen3_next_1b.py --config.data.path=…
# What precedes the script overrides its lines #SBATCH:
#   sbatch --account=A --partition=P --nodes=1 --ntasks-per-node=4 --gpus-per-node=4 deploy/slurm.sh …
#SBATCH --job-name=qwen3next
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --output=qwen3next-%j.log
#SBATCH --open-mode=append
# Every process saves five minutes before the time limit; the same sbatch then continues the run.
#SBATCH --signal=TERM@300
#SBATCH --requeue
# exclusive, mem=0: whole nodes with all their memory. append: a requeued job keeps its log.

stop() {
  echo "error: $1" >&2
  exit 2
}
[[ $1 && $1 != -* ]] ||
  stop "usage: sbatch deploy/slurm.sh FOLDER [flags of train.py], with a folder or bucket for the run, not ${1:-nothing}"
workdir=$1
shift
[[ " $*" == *" --config="* ]] || set -- --config=configs/small.py "$@"
command -v srun >/dev/null || stop "srun: not found: this script is for a SLURM cluster"
[[ $SLURM_CPUS_PER_TASK ]] || stop "not inside a job: sbatch $0 $workdir"
[[ -f train.py && -x .venv/bin/python ]] ||
  stop "$PWD has no train.py or no .venv: sbatch in the root of the checkout, after uv sync --extra gpu --extra gcs"

# Since SLURM 22.05 srun does not take --cpus-per-task from the job. The tasks start Python itself:
# with `uv run`, 32 tasks would make one environment at the same time, without a network.
exec srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" \
  .venv/bin/python train.py "$@" --workdir="$workdir"
