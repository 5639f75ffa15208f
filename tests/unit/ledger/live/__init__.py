"""Tests of ledger/live/."""
