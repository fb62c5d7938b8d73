"""Jobs of Harmony's testbed: six models, workers and parameter servers in gangs."""
