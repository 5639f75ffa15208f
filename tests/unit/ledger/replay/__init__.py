"""Tests of ledger/replay/."""
