"""Which configurations are tried, and how far: functions of what is known so far."""
