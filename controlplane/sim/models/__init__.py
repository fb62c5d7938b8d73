"""Training models: the ground truth about jobs, which no policy may see."""
