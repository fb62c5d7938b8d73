"""Goodput, in the way of Pollux (Qiao et al., OSDI '21)."""
