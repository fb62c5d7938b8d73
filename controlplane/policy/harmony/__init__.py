"""Harmony: interference-aware placement (Bao et al., INFOCOM '19)."""
