"""State of a job's training: tensors, transfers, checkpoints, schedules, random numbers."""
