"""Baseline schedulers, each modelled on its paper."""
