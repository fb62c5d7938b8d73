"""The project's ZeroMQ I/O: CURVE sockets, identities of keys, limits, and transfer of states."""
