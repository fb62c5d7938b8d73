"""The engine: the live core and policies in virtual time."""
