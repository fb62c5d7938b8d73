"""Scheduling policies behind one interface."""
