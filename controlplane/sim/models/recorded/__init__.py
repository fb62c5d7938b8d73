"""How the jobs of a live cluster train: what its journal has measured."""
