"""Process of a worker: forked by the zygote, it runs the user's script."""
