"""The command line program `ones`."""
