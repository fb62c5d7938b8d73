"""The cluster as state machines: events in, commands out; no clock, no I/O."""
