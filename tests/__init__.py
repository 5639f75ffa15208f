"""Tests, one room for each kind of evidence; conftest.py says what a room needs and in which order they run."""
