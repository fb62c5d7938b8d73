"""Engine: the live core and policies, and simulated nodes, in virtual time."""
