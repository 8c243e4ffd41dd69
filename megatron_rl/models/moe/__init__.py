"""Families with experts in all layers but perhaps the first ones."""
