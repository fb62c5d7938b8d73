"""The command line: `ones`."""
