"""Relay process, which has the ports for output, files and streams of jobs."""
