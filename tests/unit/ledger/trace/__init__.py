"""Tests of ledger/trace/."""
