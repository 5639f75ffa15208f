"""Tests of ledger/cli/."""
