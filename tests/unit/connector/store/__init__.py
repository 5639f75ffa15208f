"""Tests of connector/store/."""
