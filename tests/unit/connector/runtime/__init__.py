"""Tests of connector/runtime/."""
