"""Helpers that tests of several rooms share: logs as files, a log for the pages, and Hypothesis strategies."""
