"""State machines of the cluster: inputs in, commands out; no clock, no I/O."""
