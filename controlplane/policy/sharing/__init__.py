"""Division of a cluster among accounts, and between rigid and elastic jobs."""
