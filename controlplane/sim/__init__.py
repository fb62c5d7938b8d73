"""Simulator: the live core and policies in virtual time."""
