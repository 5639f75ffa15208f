"""What both connectors share: the ledger of one engine and what feeds it, beside vLLM.

runtime      the ledger of one engine, as the scheduler half of a connector uses it
requests     what vLLM does to requests, as events
evidence     from the workers to the engine process, over ZeroMQ
failures     the one value that says what failed, and its fields in events
failure_log  failures as lines of JSON, and counted for the statistics
compat       the members of vLLM that we extend, and the error when one is missing
rebase       how an object that vLLM built becomes an instance of our subclass
"""
