"""SLAQ: quality-driven shares (Zhang et al., SoCC '17)."""
