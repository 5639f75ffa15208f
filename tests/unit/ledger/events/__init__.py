"""Tests of ledger/queries/."""
