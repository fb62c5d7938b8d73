"""How the network of policy `drl` is trained."""
