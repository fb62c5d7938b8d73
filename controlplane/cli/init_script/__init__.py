"""`ones init`: what a plain PyTorch script is made of, and what to change to make a job of it."""
