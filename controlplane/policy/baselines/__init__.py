"""Baseline schedulers, each after its paper."""
