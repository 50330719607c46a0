#!/bin/bash
# Four nodes of 8 GPUs, one process a GPU: sbatch deploy/slurm.sh gs://BUCKET/runs/small
#SBATCH --job-name=qwen3next
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
# Every process saves five minutes before the time limit; the same sbatch then continues the run.
#SBATCH --signal=TERM@300
#SBATCH --requeue
exec srun --kill-on-bad-exit=1 uv run --extra gpu --extra gcs \
  train.py --config=configs/small.py --workdir="${1:?expected a folder or a bucket for the run}"
