"""Traces of submissions: files, importers, generators and recordings."""
