"""Families with experts in all layers, or all but the first few."""
