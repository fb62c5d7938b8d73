"""Schedulers to compare with, each in the words of its paper."""
