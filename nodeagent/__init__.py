"""Node agent: starts and watches the worker processes that the controller wants on this host."""
