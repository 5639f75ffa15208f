"""The books of a vLLM KV connector: events, the state that follows from them, the file on disk, and replay.

This package knows nothing of vLLM, torch, Mooncake or ZeroMQ, so that an engineer opens an incident on a laptop.
"""

__version__ = "0.1.0"
