"""Tests of ledger/state/."""
