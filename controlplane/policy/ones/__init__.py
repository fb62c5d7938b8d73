"""ONES: an online evolutionary search over schedules, with a batch size for every job."""
