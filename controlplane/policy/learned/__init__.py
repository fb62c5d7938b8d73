"""Learned policies: neural networks, their training environments and model files."""
