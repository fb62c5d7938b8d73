"""A worker's process: forked by the zygote, it runs the user's script."""
