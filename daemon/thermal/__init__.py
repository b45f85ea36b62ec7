"""Temperatures: which sensors there are, what they measure and what they say now."""
