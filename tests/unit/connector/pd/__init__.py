"""Tests of connector/pd/."""
