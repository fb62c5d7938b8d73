"""Handlers of inputs: free functions, one module for each subject."""
