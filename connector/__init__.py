"""The vLLM side: KV connectors that extend vLLM's Mooncake connectors and keep their books in `ledger`.

This package may import `ledger`, vLLM, torch, Mooncake and ZeroMQ. Nothing in `ledger` imports this package.
"""
