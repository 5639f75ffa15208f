"""Tests of ledger/verdicts/."""
