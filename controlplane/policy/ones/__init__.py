"""ONES: an online evolutionary search over schedules that chooses every job's batch size."""
