"""Tests of ledger/browse/."""
