"""Process of a worker: the zygote forks it, and it runs the user's script."""
