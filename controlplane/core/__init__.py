"""State machines of the cluster, which turn inputs into commands without a clock or I/O."""
