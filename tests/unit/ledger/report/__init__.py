"""Tests of ledger/report/."""
