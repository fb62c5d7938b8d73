"""`ones init`: analysis of a plain PyTorch script, and the changes that make it a job."""
