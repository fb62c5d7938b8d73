"""How classical learning jobs train: loss curves of real trainings, replayed."""
