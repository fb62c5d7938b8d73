"""Handlers of inputs. They are free functions in one module for each subject."""
