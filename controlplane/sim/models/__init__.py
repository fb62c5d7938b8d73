"""How jobs train, as nature knows it: no policy may see any of this."""
