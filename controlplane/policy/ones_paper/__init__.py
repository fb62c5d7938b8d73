"""Scheduler of the ONES paper, with an option for each ambiguity of the text."""
