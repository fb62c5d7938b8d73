"""The project's ZeroMQ I/O: CURVE sockets, identities from keys, bounds, transfer of states."""
