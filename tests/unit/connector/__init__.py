"""Tests of connector/."""
