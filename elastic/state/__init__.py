"""What a job trains and remembers: tensors, their transfer, checkpoints, everything else."""
