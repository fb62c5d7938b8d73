"""Division of a cluster between accounts, and between rigid and elastic jobs."""
