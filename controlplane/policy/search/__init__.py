"""Modules shared by the policies that search."""
