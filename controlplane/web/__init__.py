"""Web page of a cluster."""
