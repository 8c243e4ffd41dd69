"""Families in which layers differ in kind: attention in some, a recurrent state in others."""
