"""Tests of ledger/file/."""
