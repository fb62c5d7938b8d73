"""Output of workers: taken from agents, kept in files, served to followers."""
