"""Models that were trained beforehand: their files, and their evaluation without torch."""
