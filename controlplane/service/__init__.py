"""The live shell around the core: sockets in, journal, `handle`, sockets out."""
