"""The same core and policies in virtual time."""
