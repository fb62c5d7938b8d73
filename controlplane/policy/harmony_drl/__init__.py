"""Harmony: placement learnt by deep reinforcement (Bao, Peng, Wu, INFOCOM 2019)."""
