"""Choosing channels, removing them, and keeping the training going."""
