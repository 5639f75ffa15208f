"""Tests of ledger/."""
