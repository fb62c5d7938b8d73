"""Node agent, which starts and watches the workers that the controller wants on this host."""
