"""What both connectors share: the ledger of one engine and what feeds it, beside vLLM.

runtime    the ledger of one engine, as the scheduler half of a connector uses it
requests   what vLLM does to requests, as events
evidence   from the workers to the engine process, over ZeroMQ
failures   a failed transfer as a JSON line and as counters
compat     what of vLLM is extended, and the error when it is missing
rebase     how objects that vLLM has built become ours
"""
