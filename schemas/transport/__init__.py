"""The project's ZeroMQ I/O, with CURVE sockets, identities of keys, limits and state transfer."""
